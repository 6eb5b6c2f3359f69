"""Starts the ranks of one node and waits for them. Standard library only: it starts in a tenth of a second."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tridock.node.supervisor.verdict import signal_name

_REPORT_S: Final = 1.0
"""Seconds from the first failure to SIGTERM: other ranks report theirs, and the node agent reads the wait status."""
_KILLED_S: Final = 5.0
"""Seconds after SIGKILL; a process in state D does not end."""
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT)
_AWAITED: Final = (signal.SIGCHLD, *_FORWARDED)
_PR_SET_PDEATHSIG: Final = 1
_SI_KERNEL: Final = 0x80


Failed = Callable[[int, int], object]
"""Called with a rank and its wait(2) status."""


def rank_environments(ranks: Sequence[int], node_rank: int, master_addr: str, master_port: int) -> list[dict[str, str]]:
    """Returns the variables of each rank of a node: those of DeepSpeed's launcher, torchrun's LOCAL_WORLD_SIZE, and
    Lightning's NODE_RANK. ``ranks``: the number on each node."""
    own = ranks[node_rank]
    node = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "WORLD_SIZE": str(sum(ranks)),
        "LOCAL_WORLD_SIZE": str(own),
        "LOCAL_SIZE": str(own),
        "CROSS_SIZE": str(len(ranks)),
        "CROSS_RANK": str(node_rank),
        "NODE_RANK": str(node_rank),
    }
    first = sum(ranks[:node_rank])
    return [{**node, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(own)]


def start_ranks(
    environments: Sequence[Mapping[str, str]], program: Sequence[str], grace_s: float, failed: Failed | None = None
) -> int:
    """Runs the program once per environment; returns the exit code of the first rank that failed.

    Forwards SIGTERM and SIGINT, and waits for the ranks. If one fails, ends the others and calls ``failed`` with the
    first one. The kernel kills the ranks if this process dies.
    """
    prctl, starter = ctypes.CDLL(None).prctl, os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    # Kept until the end: a garbage-collected Popen reaps its process.
    ranks = {
        int(env["RANK"]): subprocess.Popen(program, env=os.environ | env, preexec_fn=prepare) for env in environments
    }
    return _wait({rank: process.pid for rank, process in ranks.items()}, grace_s, failed)


def _wait(running: dict[int, int], grace_s: float, failed: Failed | None = None) -> int:
    """Waits for the processes in ``running``, which has their pids by rank; returns the exit code of the first failure.

    Does not reap them: a reaped process no longer shows its wait status to the node agent.
    """
    code, failed_at = 0, 0.0
    deadlines = [(_REPORT_S, signal.SIGTERM), (_REPORT_S + grace_s, signal.SIGKILL)]
    while running:
        after_s = deadlines[0][0] if deadlines else _REPORT_S + grace_s + _KILLED_S
        timeout = max(0.0, failed_at + after_s - time.monotonic()) if code else threading.TIMEOUT_MAX
        received = signal.sigtimedwait(_AWAITED, timeout)
        if received is None:
            if not deadlines:
                break
            _send(running, deadlines.pop(0)[1])
        elif received.si_signo in _FORWARDED and received.si_code != _SI_KERNEL:
            # The terminal's Ctrl-C has already reached the ranks through the kernel.
            _send(running, signal.Signals(received.si_signo))
        for rank, pid in list(running.items()):
            if (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
                continue
            del running[rank]
            if (status := ended.si_status) == 0:
                continue
            left = ended.si_code == os.CLD_EXITED
            if len(deadlines) == 2:  # later ranks end because they were signaled
                how = f"exited with code {status}" if left else f"was ended by {signal_name(status)}"
                print(f"rank {rank} (pid {pid}) {how}", file=sys.stderr, flush=True)
            if not code:
                code, failed_at = status if left else 128 + status, time.monotonic()
                if failed is not None:
                    failed(rank, status << 8 if left else status)
    if code:
        time.sleep(max(0.0, failed_at + _REPORT_S - time.monotonic()))
    return code


def _send(running: Mapping[int, int], number: signal.Signals) -> None:
    for pid in running.values():
        os.kill(pid, number)  # a process that has ended keeps its pid until it is reaped
