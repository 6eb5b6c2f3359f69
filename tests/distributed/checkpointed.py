"""One rank of an engine whose disk is full in the middle of one of its saves and free again after it, or never answers.

``python -m tests.distributed.checkpointed MODULE full:ITERATION:RANK|paused:ITERATION|slow:ITERATION --run-folder …``:
MODULE is the engine's program. While that iteration is saved, that rank can write no file larger than some bytes, or no
rank comes to the end of writing. Or each save from that iteration on takes its time, so that a test can be in time.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.rank.run import end

LIMIT = 20_000
SLOW_S = 0.5


def main() -> int:
    """Takes two arguments, and leaves the rest to the engine's program."""
    _, module, fault, *arguments = sys.argv
    sys.argv = [module, *arguments]
    kind, at, *rank = fault.split(":")
    start = Checkpoints.start

    def limited(self: Checkpoints, prepare: Any, iteration: int, *rest: Any) -> Any:
        if kind == "slow" and iteration >= int(at):
            time.sleep(SLOW_S)
            return start(self, prepare, iteration, *rest)
        if iteration != int(at) or rank not in ([], [os.environ["RANK"]]):
            return start(self, prepare, iteration, *rest)
        if kind == "paused":
            start(self, prepare, iteration, *rest)
            return threading.Event().wait
        with full_disk():
            write = start(self, prepare, iteration, *rest)
        return lambda: full_disk()(write)()

    Checkpoints.start = limited  # type: ignore[method-assign]
    code: int = importlib.import_module(module).main()
    return code


@contextmanager
def full_disk() -> Iterator[None]:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


if __name__ == "__main__":
    end(main(), at_once=True)
