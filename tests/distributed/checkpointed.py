"""One rank of an engine whose disk is full in the middle of one of its saves, and free again after it.

``python -m tests.distributed.checkpointed MODULE ITERATION:RANK --run-folder …``: MODULE is the engine's program; that
rank can write no file larger than some bytes while that iteration is saved.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from typing import Any

from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.rank.run import end

LIMIT = 20_000


def main() -> int:
    """Takes two arguments, and leaves the rest to the engine's program."""
    _, module, full, *arguments = sys.argv
    sys.argv = [module, *arguments]
    full_iteration, rank = map(int, full.split(":"))
    save = Checkpoints.save

    def limited(self: Checkpoints, write: Any, iteration: int, *rest: Any) -> Any:
        if (iteration, os.environ["RANK"]) != (full_iteration, str(rank)):
            return save(self, write, iteration, *rest)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, most))
        try:
            return save(self, write, iteration, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    Checkpoints.save = limited  # type: ignore[method-assign]
    code: int = importlib.import_module(module).main()
    return code


if __name__ == "__main__":
    end(main(), at_once=True)
