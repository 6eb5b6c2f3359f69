"""``tridock.node vote``: a node's voice in who supervises a run (``tridock.contracts.vote``), kept on its own disk.

``.vote-NODE`` in the run's folder holds the vote; it is on the disk before the answer leaves. A renewal only touches
``.vote-NODE.time``, with the boot and the time since: a voter that has restarted, or cannot read it, starts over.
"""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts.codec import decode, encode
from tridock.contracts.run_folder import write_atomic
from tridock.contracts.vote import Vote, VoteAnswer, VoteRequest, decide

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def clock() -> float:
    """Returns the seconds since this machine started, with the time that it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def answer_requests(folder: Path, node: str) -> None:
    """Answers requests, a line of JSON each, until standard input ends."""
    for line in sys.stdin:
        print(encode(answer(folder, node, decode(VoteRequest, line))), flush=True)


def answer(folder: Path, node: str, request: VoteRequest) -> VoteAnswer:
    """Decides on a request; returns once the vote is on the disk."""
    with _locked(folder, node):
        before = vote_of(folder, node)
        after, reply = decide(before, request, clock())
        if _without_time(after) != _without_time(before):
            write_atomic(_path(folder, node), encode(after).encode())
        if after.granted_at is not None:
            _time_path(folder, node).write_text(f"{_boot()} {after.granted_at}")
    return reply


def vote_of(folder: Path, node: str) -> Vote:
    """Returns the node's vote; without one, the vote of a node that has never been asked."""
    try:
        vote = decode(Vote, _path(folder, node).read_bytes())
    except FileNotFoundError:
        return Vote()
    return vote if vote.granted_at is None else replace(vote, granted_at=_granted_at(folder, node))


def _without_time(vote: Vote) -> Vote:
    return vote if vote.granted_at is None else replace(vote, granted_at=0.0)


def _granted_at(folder: Path, node: str) -> float:
    try:
        boot, at = _time_path(folder, node).read_text().split()
        return min(float(at), clock()) if boot == _boot() else clock()
    except (OSError, ValueError):
        return clock()


@contextmanager
def _locked(folder: Path, node: str) -> Iterator[None]:
    with os.fdopen(os.open(folder / f".vote-{node}.lock", os.O_RDWR | os.O_CREAT, 0o644)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _boot() -> str:
    return _BOOT.read_text().strip()


def _path(folder: Path, node: str) -> Path:
    return folder / f".vote-{node}"


def _time_path(folder: Path, node: str) -> Path:
    return folder / f".vote-{node}.time"
