"""Stacks of ranks that cannot be asked for them, such as those of your own program: py-spy reads them from outside."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from tridock.contracts.node_answers import Process

PY_SPY_S: Final = 4.0
"""Seconds for the stacks of all ranks of a node."""
_AT_ONCE: Final = 8
_MAIN: Final = "MainThread"
_SHOWN: Final = 200


def program_stacks(pids: Mapping[int, int], processes: Sequence[Process]) -> dict[int, str]:
    """Returns the stacks of each rank's Python in faulthandler's form, or why there are none.

    ``pids`` has each rank's outermost process, which may be a shell; ``processes`` are those of the run.
    """
    program = shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")
    if program is None:
        return dict.fromkeys(pids, "none: py-spy is not in the image; install it there (pip install py-spy)\n")
    read = partial(_stacks, program, time.monotonic() + PY_SPY_S)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        texts = pool.map(read, [_python_below(pid, processes) for pid in pids.values()])
        return dict(zip(pids, texts, strict=True))


def _python_below(pid: int, processes: Sequence[Process]) -> int:
    """Returns the outermost Python among a process and those below it; the process itself if none is one."""
    level = [pid]
    while level:
        for it in level:
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{it}/exe").readlink().name.startswith("python"):
                    return it
        level = [process.pid for process in processes if process.ppid in level]
    return pid


def _stacks(program: str, deadline: float, pid: int) -> str:
    # Without a pause of the process: what hangs does not change meanwhile, and may not answer a debugger.
    argv = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        limit_s = max(0.0, deadline - time.monotonic())
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"none: py-spy has not read process {pid} within {PY_SPY_S:.0f} s\n"
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it says nothing"])[0].removeprefix("Error: ")
        why = why.partition(": Try running again")[0]  # with sudo, which a node has not
        return f"none: py-spy cannot read process {pid}: {why}\n"
    try:
        if text := _all_threads(json.loads(done.stdout)):
            return text
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # another program of that name, or another version
    got = ascii(done.stdout[:_SHOWN]) if done.stdout.strip() else "nothing"
    return f"none: py-spy has not printed the threads of process {pid} in the JSON of py-spy 0.4; got {got}\n"


def _all_threads(threads: Sequence[Mapping[str, Any]]) -> str:
    """Returns the stacks of a process's threads, that of its main thread last."""
    return "".join(map(_text, sorted(threads, key=_is_main)))


def _is_main(thread: Mapping[str, Any]) -> bool:
    """Whether it is the main thread, which has a name only where the program uses threads."""
    return bool(thread["os_thread_id"] == thread["pid"] or thread["thread_name"] == _MAIN)


def _text(thread: Mapping[str, Any]) -> str:
    name = thread["thread_name"] or thread["os_thread_id"]
    frames = (f'  File "{it["filename"]}", line {it["line"]} in {it["name"]}\n' for it in thread["frames"])
    return f"Thread {name} (most recent call first):\n{''.join(frames)}"
