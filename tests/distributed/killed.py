"""One rank that is killed at a file operation on its checkpoints, or in the middle of one of their files.

``python -m tests.distributed.killed MODULE operation:RANK:N|bytes:RANK:N|count --run-folder …``: MODULE is the engine's
program. That rank ends as SIGKILL ends it, before the Nth operation that changes the folder of the checkpoints, from
their constructor on; or once a file that it writes has N bytes (before its third save if it writes none as large).
``count`` ends each rank after two saves and writes the number of its operations until then beside the folder.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.rank.run import end

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")
"""Audit events: each comes before the change."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def changes(event: str, args: tuple[Any, ...], folder: Path) -> bool:
    """Whether an audit event announces a change of what is in the folder."""
    if event == "open":
        path, _, flags = args
        return isinstance(path, str | os.PathLike) and bool(flags & WRITES) and inside(path, folder)
    # rmtree names files relative to an open folder.
    return event in CHANGES and (inside(args[0], folder) or args[-1] not in (-1, None))


def inside(path: Any, folder: Path) -> bool:
    return os.fspath(path).startswith(str(folder))


class Fault:
    """What ends this rank, and how many operations there have been."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number = kind, number
        self.operations = self.saves = 0
        self.folder: Path | None = None

    def watch(self, folder: Path) -> None:
        """Begins with the first ``Checkpoints``."""
        if self.folder is None:
            self.folder = folder
            sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        assert self.folder is not None
        if (event == "open" or event in CHANGES) and changes(event, args, self.folder):
            self.operations += 1
            if self.kind == "operation" and self.operations == self.number:
                os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        """Before each save."""
        assert self.folder is not None
        self.saves += 1
        if self.kind == "count" and self.saves == 3:
            self.finish()
        if self.kind == "bytes" and self.saves == 3:  # it writes no such file
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "bytes" and self.saves == 1:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.number, resource.RLIM_INFINITY))

    def finish(self) -> NoReturn:
        assert self.folder is not None
        count_file(self.folder, int(os.environ["RANK"])).write_text(str(self.operations))
        os._exit(0)


def count_file(folder: Path, rank: int) -> Path:
    """Where a rank writes how many operations it has counted."""
    return folder.parent / f"{folder.name}-operations-{rank}"


def main() -> int:
    """Takes two arguments, and leaves the rest to the engine's program."""
    _, module, given, *arguments = sys.argv
    sys.argv = [module, *arguments]
    kind, *numbers = given.split(":")
    if kind == "count" or os.environ["RANK"] == numbers[0]:
        fault = Fault(kind, int(numbers[1]) if numbers else 0)
        construct, start = Checkpoints.__init__, Checkpoints.start

        def constructed(self: Checkpoints, folder: Path, *rest: Any, **named: Any) -> None:
            fault.watch(folder)
            construct(self, folder, *rest, **named)

        def started(self: Checkpoints, *given: Any, **named: Any) -> Any:
            fault.save()
            return start(self, *given, **named)

        Checkpoints.__init__, Checkpoints.start = constructed, started  # type: ignore[method-assign]
    code: int = importlib.import_module(module).main()
    return code


if __name__ == "__main__":
    end(main(), at_once=True)
