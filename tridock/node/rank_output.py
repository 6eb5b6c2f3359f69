"""Copies the output of a rank of your own program to its log, ``logs/rank-<N>.log``, and has its end recorded.

The launcher starts this module in place of the program, as in ``torchrun -m tridock.node.rank_output train.py``. It
replaces itself with the program, so that process id, signals and exit code stay the program's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tridock.contracts import environment, run_folder
from tridock.node import process_end

PROGRAM = "--program"
"""First argument, if the rest is any program and not arguments of Python."""
WATCHED = "--watched"
"""The same for a program whose output is left alone: mpirun gives it a terminal, which flushes every line."""
# Detached, as a program may wait for all of its children; ignores the rank's signals, to copy its last lines.
_COPY = 'trap "" INT TERM HUP; tee -a "$0" <&3 3<&- &'

_PR_SET_PTRACER = 0x59616D61
_ANY = 2**64 - 1


def main() -> None:
    """Copies all further output, has this process watched, and replaces it with the program."""
    argv = sys.argv[1:]
    local_rank = [argv.pop(0)] if argv and argv[0].startswith(("--local_rank=", "--local-rank=")) else []
    watched = argv[:1] == [WATCHED]
    if watched or argv[:1] == [PROGRAM]:
        command = argv[1:]
    else:  # DeepSpeed adds its arguments after the script, or after -m and the module
        script = 2 if argv[:1] == ["-m"] else 1
        command = [sys.executable, "-u", *argv[:script], *local_rank, *argv[script:]]
    folder, rank = os.environ.get(environment.RUN_FOLDER), environment.rank_of(os.environ)
    if folder is not None and rank is not None:
        process_end.watch(Path(folder), rank)
        _let_py_spy_read()
        if not watched:
            copy_output(Path(folder) / run_folder.rank_log(rank))
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's program
    except OSError as error:
        _not_started(command[0], error.strerror or str(error))


def _let_py_spy_read() -> None:
    """Lets the user's other processes read this one, and so the program's stacks: with kernel.yama.ptrace_scope: 1, as
    on Ubuntu, only its parents may. Elsewhere the call does nothing.
    """
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)


def _not_started(program: str, why: str) -> None:
    # Imported here: the program's own Python may be an older one, which only runs the program.
    from tridock.contracts.events import Cause, append_event

    cause, reason = Cause.PROGRAM_NOT_STARTED, f"cannot start {program}: {why}"
    if folder := os.environ.get(environment.RUN_FOLDER):
        rank, node = environment.rank_of(os.environ) or 0, os.environ.get(environment.NODE, "")
        append_event(Path(folder), cause.event, rank=rank, node=node, cause=cause, reason=reason)
    print(f"{program}: cannot be started; got {why}; install it in the image", file=sys.stderr)
    sys.exit(127)


def copy_output(log: Path) -> None:
    """Also copies all further output of this process and its children to ``log``."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        print(f"tridock: {log}: cannot be written ({error.strerror}); no copy of the output", file=sys.stderr)
        return
    source, target = os.pipe()
    # Without the rank's variables: the copying process is not part of the rank.
    env = {name: os.environ[name] for name in ("PATH", environment.RUN_ID) if name in os.environ}
    os.dup2(source, 3)
    subprocess.run(["sh", "-c", _COPY, str(log)], env=env, pass_fds=(3,), stdin=subprocess.DEVNULL, check=True)
    os.dup2(target, 1)
    os.dup2(target, 2)
    for descriptor in {3, source, target} - {1, 2}:
        os.close(descriptor)


if __name__ == "__main__":
    main()
