"""``python -m tests.distributed.no_index MODULE …``: a rank whose node has no room for the index of a checkpoint."""

import errno
import runpy
import sys
from typing import NoReturn

from torch.distributed.checkpoint import FileSystemWriter


def full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


if __name__ == "__main__":
    FileSystemWriter.finish = full  # type: ignore[method-assign]
    _, module, *sys.argv[1:] = sys.argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)
