"""One rank of engine ``megatron-deepspeed`` that records what it exchanges in its third iteration.

Takes the arguments of the rank's own program, and writes ``exchanged-<rank>.json`` into the run's folder: the group's
size, the name and the bytes of each collective or message.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.distributed.exchanged import Recorder
from tridock.train.megatron_lm import pretrain_gpt2, record
from tridock.train.rank.run import end

ITERATION = 3


def main() -> int:
    made = record.Recorder
    folder = Path(sys.argv[sys.argv.index("--run-folder") + 1])

    def recording(training: Any, *given: Any) -> Any:
        recorder, step, iterations = made(training, *given), training.train_step, iter(range(1, 1000))

        def train_step(*arguments: Any, **named: Any) -> Any:
            if next(iterations) != ITERATION:
                return step(*arguments, **named)
            with Recorder(lambda group: group) as calls:
                done = step(*arguments, **named)
            (folder / f"exchanged-{os.environ['RANK']}.json").write_text(json.dumps([call[1:] for call in calls.calls]))
            return done

        training.train_step = train_step
        return recorder

    record.Recorder = recording  # type: ignore[misc,assignment]
    return pretrain_gpt2.main()


if __name__ == "__main__":
    end(main())
