"""Errors of collectives: the loss of another rank, or a failure of NCCL, with NCCL's own message."""

from typing import Final

import torch.distributed as dist

from tridock.contracts.events import Cause
from tridock.errors import Problem

_LOST: Final = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection closed by remote peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
)


def collective_error(error: RuntimeError) -> Problem | None:
    """Returns the problem to report for a failed collective; None for any other error.

    Its cause is :attr:`Cause.PEER_LOST` if the connection to another rank was lost, and :attr:`Cause.NCCL_FAILED` if
    NCCL itself failed.
    """
    got = reason(error)
    if any(mark in str(error) for mark in _LOST):
        # A traceback would bury the message of the rank that failed first.
        todo = "look for the rank that failed first: its message is in logs/rank-<N>.log"
        return Problem("collective", "lost the connection to another rank", got, todo, cause=Cause.PEER_LOST)
    if isinstance(error, dist.DistBackendError):
        todo = "set NCCL_DEBUG: INFO in the experiment's env, and read the lines before this one"
        return Problem("collective", "NCCL failed", got, todo, cause=Cause.NCCL_FAILED)
    return None


def reason(error: BaseException) -> str:
    """Returns one line: NCCL's last error and the code of the failure, or the error of Gloo's socket."""
    text = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.partition("\nException raised from")[0].splitlines()]
    first = lines[0].rpartition("pair.cc:")[2].partition("] ")[2] or lines[0]
    code = next((line for line in lines if line.startswith("nccl")), first.partition(". This is typically")[0])
    last = " ".join(filter(None, lines[lines.index("Last error:") + 1 :])) if "Last error:" in lines else ""
    return f"{last} ({code.rstrip('.')})" if last else code
