"""A rank of engine ``megatron-deepspeed`` that keeps the tokens of its last iteration: ``batch-<rank>.pt``.

Takes the arguments of the rank's own program. Without a pipeline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tridock.train.megatron_lm import pretrain_gpt2, record
from tridock.train.rank.run import end


def main() -> int:
    made = record.Recorder
    folder = Path(sys.argv[sys.argv.index("--run-folder") + 1])

    def recording(training: Any, *given: Any) -> Any:
        recorder, step = made(training, *given), training.train_step

        def train_step(forward: Any, iterator: Any, *rest: Any) -> Any:
            batches: list[torch.Tensor] = []

            def kept() -> Iterator[Any]:
                for batch in iterator:
                    batches.append(batch["text"])
                    yield batch

            done = step(forward, kept(), *rest)
            torch.save(torch.cat(batches), folder / f"batch-{os.environ['RANK']}.pt")
            return done

        training.train_step = train_step
        return recorder

    record.Recorder = recording  # type: ignore[misc,assignment]
    return pretrain_gpt2.main()


if __name__ == "__main__":
    end(main())
