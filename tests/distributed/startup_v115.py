"""Runs Megatron v1.1.5 as one rank until its first step, with the engine's arguments.

Prints this rank's peak memory, in bytes: ``[until the model was built, from then until the first step]``.
"""

from __future__ import annotations

import json
from typing import Any, Never

from tests.memory.ledger import Ledger, Place
from tridock.train.megatron_lm import pretrain_gpt2
from tridock.train.megatron_lm.record import Recorder
from tridock.train.rank.run import end


def main() -> int:
    ledger, peaks, get_optimizer = Ledger(Place()), [], Recorder.get_optimizer

    def built(recorder: Recorder, model: Any) -> Any:
        peaks.append(ledger.peak)
        ledger.restart()
        return get_optimizer(recorder, model)

    def ready(*_: Any) -> Never:
        peaks.append(ledger.peak)
        raise SystemExit(0)

    Recorder.get_optimizer, Recorder.train = built, ready  # type: ignore[method-assign]
    with ledger:
        code = pretrain_gpt2.main()
    print(json.dumps(peaks), flush=True)
    return code


if __name__ == "__main__":
    end(main(), at_once=True)
