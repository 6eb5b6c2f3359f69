"""How a process ended: seen by one that is not its parent, and recorded by one that watches a rank from its start.

A launcher that is not Tridock's reaps its ranks, and may not tell which of them was first. So each rank of your own
program starts ``python -m tridock.node.process_end FOLDER NODE RANK PID`` before it becomes the program, see
:mod:`tridock.node.rank_output`: a process beside the rank, which waits for its end, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts import environment, heartbeat, process_records
from tridock.contracts.heartbeat import Heartbeat
from tridock.contracts.process_records import ProcessRecord
from tridock.node.agent.memory_kills import memory_kills

_START_S: Final = 30.0
"""Seconds to wait for the watching process to start; after that the rank runs without it."""
_POLL_S: Final = 0.02
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", environment.RUN_ID)
_PIDFD_INFO: Final = "=Q52xi"  # mask, other fields, exit_code
_PIDFD_INFO_EXIT: Final = 1 << 3
_PIDFD_GET_INFO: Final = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)


def process_state(process: Heartbeat | ProcessRecord) -> tuple[str | None, int | None]:
    """Returns the process state letter (None once it has ended), and the wait status while it is visible."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None, None
    if int(fields[19]) != process.start_ticks:
        return None, None  # another process has reused its pid
    # A process that has ended and is not yet reaped still shows its wait status: proc(5), field 52.
    return (None, int(fields[49])) if fields[0] in "ZX" else (fields[0], None)


def reaped_status(pidfd: int) -> int | None:
    """Returns the wait status of a process that its parent has reaped; None where the kernel is older than 6.15.

    Source: ``struct pidfd_info`` in Linux, ``include/uapi/linux/pidfd.h``; ``exit_code`` has field 52's encoding.
    """
    info = bytearray(struct.pack(_PIDFD_INFO, _PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, exit_code = struct.unpack(_PIDFD_INFO, info)
    return int(exit_code) if mask & _PIDFD_INFO_EXIT else None


def watch(folder: Path, rank: int) -> None:
    """Starts the process that records the end of this one, a rank; returns once it watches.

    It is no child of this process, which may wait for all of its children, and not part of the rank: it has none of its
    variables, output or signals.
    """
    node = os.environ.get(environment.NODE)
    if not node:
        return
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-S", "-m", "tridock.node.process_end", str(folder), node, str(rank), str(os.getpid())]
    null = subprocess.DEVNULL
    with suppress(OSError, subprocess.TimeoutExpired):  # the agent then goes by what it sees of the rank
        subprocess.run(
            argv, env=env, cwd="/", stdin=null, stdout=null, stderr=null, start_new_session=True, timeout=_START_S,
            check=False,
        )  # fmt: skip


def main() -> None:
    """Records a rank's start, leaves a process behind that waits for the rank's end, and records that."""
    folder, node, pid = Path(sys.argv[1]), sys.argv[2], int(sys.argv[4])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a run
        signal.signal(number, signal.SIG_IGN)
    pidfd = _pidfd_of(pid)
    ticks, here = heartbeat.start_ticks(pid), process_records.this_container()
    begun = ProcessRecord(int(sys.argv[3]), pid, ticks, here, time.monotonic(), memory_kills())
    process_records.write(folder, node, begun)
    if os.fork():
        os._exit(0)
    status = _wait(begun, pidfd)
    process_records.write(folder, node, replace(begun, ended_s=time.monotonic(), wait_status=status))


def _pidfd_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # the kernel is older than 5.3, Python older than 3.9
        return None


def _wait(process: ProcessRecord, pidfd: int | None) -> int | None:
    """Waits for the end of a process; returns its wait status, if that can be seen."""
    if pidfd is not None:
        select.select([pidfd], [], [])
        _, status = process_state(process)
        return reaped_status(pidfd) if status is None else status
    while (seen := process_state(process))[0] is not None:
        time.sleep(_POLL_S)
    return seen[1]


if __name__ == "__main__":
    main()
