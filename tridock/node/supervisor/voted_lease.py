"""The lease of a supervisor whose nodes do not share the run's folder: a majority of the voters has granted it.

A thread for each voter asks ``tridock.node vote`` there every ``RENEW_S`` seconds, whatever the supervisor itself waits
for. A supervisor that cannot renew at a majority within ``HOLD_S`` has lost the run, whether or not another has it.
"""

import os
import secrets
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self

from tridock.contracts import run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.lease import Lease, LeaseLostError, record
from tridock.contracts.supervision import Reach, Supervision
from tridock.contracts.vote import HOLD_S, RENEW_S, Copy, VoteAnswer, VoteRequest, held_until
from tridock.node.agent.voter import clock, vote_of

_ANSWER_S: Final = 8.0
_LATE: Final = 3
"""Late answers of a login after which another begins."""
_RETRY_S: Final = 1.0
_VOTE_S: Final = 10.0
_START_S: Final = 40.0
_POLL_S: Final = 0.05
_CHUNK: Final = 1 << 16


class Voter:
    """The connection to one voter, opened when it is needed. A slow login gets the time of several requests."""

    def __init__(self, folder: Path, supervision: Supervision, node: str) -> None:
        reach = Reach() if node == supervision.head else supervision.reach
        self._command = reach.command(node, "vote", str(folder), node)
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self._late = 0
        """The answers to earlier requests that have not arrived yet; they arrive first."""
        self._partial_line = b""
        self._lock = threading.Lock()

    def ask(self, request: VoteRequest) -> VoteAnswer | None:
        """Returns the voter's answer; None if it does not answer in time."""
        with self._lock:
            try:
                return decode(VoteAnswer, self._exchange(encode(request).encode() + b"\n"))
            except TimeoutError:
                # After an interruption, TCP itself may wait longer to send again than a new login takes.
                self._late += 1
                if self._has_answered or self._late > _LATE:
                    self._close()
            except (OSError, ValueError):
                self._close()
            return None

    def _exchange(self, line: bytes) -> bytes:
        if self._process is None:
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            # In a session of its own, so that signals to the supervisor's group do not reach it.
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=null, cwd="/", start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.write(self._process.stdin.fileno(), line)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            patience = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], patience)[0]:
                raise TimeoutError
            if not (chunk := os.read(self._process.stdout.fileno(), _CHUNK)):
                raise BrokenPipeError
            *answers, self._partial_line = (self._partial_line + chunk).split(b"\n")
            self._has_answered = self._has_answered or bool(answers)
            if len(answers) > self._late:
                self._late = 0
                return answers[-1]
            self._late -= len(answers)

    def interrupt(self) -> None:
        """Ends a request that waits for its answer."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._has_answered, self._late, self._partial_line = None, False, 0, b""


Voters = Mapping[str, Voter]
"""The voters by node."""


class VotedLease:
    """The lease that this process asks for, and then holds."""

    def __init__(
        self,
        folder: Path,
        supervision: Supervision,
        token: int,
        copied: Copy,
        voters: Voters | None = None,
        *,
        starts: bool = False,
    ) -> None:
        self.token, self.prepared_at = token, prepared_at(folder, supervision)
        self._copied = copied
        self._folder, self._node, self._starts = folder, supervision.head, starts
        self._holder = f"{self._node}-{secrets.token_hex(8)}"
        self._voters = voters_of(folder, supervision) if voters is None else voters
        self._granted: dict[str, float] = {}
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    @classmethod
    def first(cls, folder: Path, supervision: Supervision) -> Self:
        """Gets the lease of a run that a user starts. Raises :class:`LeaseLostError` without a majority."""
        deadline, voters = time.monotonic() + _START_S, voters_of(folder, supervision)
        while True:
            answers = survey(voters, supervision.head)
            token = 1 + max((answer.token for answer in answers.values()), default=0)
            lease = cls(folder, supervision, token, (token, 0), voters, starts=True)
            if lease.acquire():
                return lease
            if time.monotonic() > deadline:
                close(voters)
                raise LeaseLostError(f"the run cannot start: {_silent(supervision, answers)}")
            time.sleep(_RETRY_S)

    def acquire(self) -> bool:
        """Asks the voters for the lease; returns whether a majority has granted it. Gives it back if not."""
        self.start()
        deadline = time.monotonic() + _VOTE_S
        while not (held := self._is_held()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not held:
            self._give_back(is_over=False)
            return False
        self._copied = max(self._copied, (self.token, 0))
        record(self._folder, self.token, Lease(self._node, self.prepared_at))
        return True

    def start(self) -> None:
        """Starts the threads that ask, and renew; also after :meth:`pause`."""
        self._closed.clear()
        self._threads = [threading.Thread(target=self._keep_asking, args=(node,), daemon=True) for node in self._voters]
        for thread in self._threads:
            thread.start()

    def pause(self) -> None:
        """Ends threads and connections before a fork, at once: the lease stays held for ``HOLD_S``."""
        self._closed.set()
        for voter in self._voters.values():
            voter.interrupt()
        self._end_threads()
        close(self._voters)

    def _end_threads(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _keep_asking(self, node: str) -> None:
        while not self._closed.is_set():
            sent = clock()
            answer = self._voters[node].ask(self._request())
            if answer is not None and answer.granted:
                self._granted[node] = sent
            self._closed.wait(_RETRY_S if answer is None else RENEW_S)

    def _request(self, **fields: bool) -> VoteRequest:
        return VoteRequest(self.token, self._holder, self._node, self._copied, starts=self._starts, **fields)

    def _is_held(self) -> bool:
        return clock() < held_until(dict(self._granted), len(self._voters))

    def check(self) -> None:
        """Raises :class:`LeaseLostError` once a majority has not granted the lease for too long."""
        if not self._is_held():
            voters = ", ".join(self._voters)
            raise LeaseLostError(
                f"the supervisor on {self._node} got no answer from a majority of {voters} for {HOLD_S:.0f} s, or was "
                "suspended: another node may take over the run"
            )

    def renew(self) -> None:
        """Raises like :meth:`check`; threads renew it."""
        self.check()

    def ends_ranks_here(self) -> bool:
        """Whether this node has granted no newer lease: no other supervisor has started these ranks."""
        return vote_of(self._folder, self._node).token <= self.token

    def note_copy(self, iteration: int) -> None:
        """Tells the voters: from now on no older copy may lead the run."""
        self._copied = max(self._copied, (self.token, iteration))

    def end(self) -> None:
        """Tells the voters that the run is over."""
        self._give_back(is_over=True)
        close(self._voters)

    def _give_back(self, *, is_over: bool) -> None:
        self._closed.set()
        self._granted.clear()
        request = self._request(gives_back=True, is_over=is_over)
        with ThreadPoolExecutor(len(self._voters)) as pool:
            list(pool.map(lambda voter: voter.ask(request), self._voters.values()))
        self._end_threads()


def prepared_at(folder: Path, supervision: Supervision) -> float:
    """Returns when the run was first prepared (a file's time)."""
    return supervision.prepared_at or (folder / run_folder.SUPERVISION).stat().st_mtime


def voters_of(folder: Path, supervision: Supervision) -> Voters:
    """Returns the run's voters, not connected yet."""
    return {node: Voter(folder, supervision, node) for node in supervision.voters}


def close(voters: Voters) -> None:
    """Ends the connections; the next request opens them again."""
    for voter in voters.values():
        voter.close()


def survey(voters: Voters, node: str) -> dict[str, VoteAnswer]:
    """Returns what the voters have granted, for those that answer ``node``; changes nothing."""
    nothing = VoteRequest(0, "", node, (0, 0), gives_back=True)
    with ThreadPoolExecutor(len(voters)) as pool:
        answers = dict(zip(voters, pool.map(lambda voter: voter.ask(nothing), voters.values()), strict=True))
    return {node: answer for node, answer in answers.items() if answer is not None}


def _silent(supervision: Supervision, answers: dict[str, VoteAnswer]) -> str:
    silent = [node for node in supervision.voters if node not in answers]
    if silent:
        return f"no majority of {', '.join(supervision.voters)} answers: {', '.join(silent)} does not"
    holder = max(answers.values(), key=lambda answer: answer.left_s)
    return f"a supervisor on {holder.node} has it"
