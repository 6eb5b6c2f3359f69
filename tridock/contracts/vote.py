"""Leases by a majority vote: who supervises a run whose nodes do not share its folder. Pure; all times are given.

Each voter keeps one :class:`Vote`: the newest lease that it has granted. A supervisor holds the lease as long as a
majority has granted it within ``HOLD_S`` of its own clock, counted from when it asked. A voter grants nothing to
another for ``LEASE_S`` of its own clock, counted from when it answered, which is later. As no clock runs more than a
tenth too fast or too slow, the holder's time is over before any voter's is, and two majorities have a voter in common:
there are never two holders.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

LEASE_S: Final = 15.0
HOLD_S: Final = 12.0
"""Shorter than ``LEASE_S`` by more than two clocks can differ that are each a tenth wrong."""
RENEW_S: Final = 2.0
MOST_VOTERS: Final = 5
FEWEST_VOTERS: Final = 3

Copy = tuple[int, int]
"""How new a copy of a run's folder is: the token of the lease under which it was made, and its iteration."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What a voter has granted last. Every change but ``granted_at`` must be on its disk before it answers."""

    token: int = 0
    """The fencing token of the lease."""
    holder: str = ""
    """The supervisor's own name, which no other process ever has."""
    node: str = ""
    """The node on which it runs."""
    copied: Copy = (0, 0)
    """The newest :data:`Copy` of the run's folder that another node has."""
    is_over: bool = False
    """Whether the run has ended: no node is to take it over."""
    granted_at: float | None = None
    """By the voter's clock; None if the lease was given back."""

    def left_s(self, now: float) -> float:
        """Returns the seconds until the lease expires for this voter."""
        return 0.0 if self.granted_at is None else max(0.0, self.granted_at + LEASE_S - now)


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """A supervisor asks for the lease, renews it, or gives it back."""

    token: int
    holder: str
    node: str
    copied: Copy
    """The newest copy: the candidate's own; from the holder, the newest that another node has."""
    starts: bool = False
    """Whether a user starts the run, which may have ended before."""
    gives_back: bool = False
    is_over: bool = False
    """With ``gives_back``: the run has ended. Otherwise the sender has not held the lease, and never will."""


@dataclass(frozen=True, slots=True)
class VoteAnswer:
    """A voter's answer, with the lease that it has granted last."""

    granted: bool
    token: int
    node: str
    left_s: float
    is_over: bool


def decide(vote: Vote, request: VoteRequest, now: float) -> tuple[Vote, VoteAnswer]:
    """Returns the voter's new vote, and its answer."""
    if (request.token, request.holder) == (vote.token, vote.holder):
        if request.gives_back:
            vote = replace(vote, granted_at=None, is_over=request.is_over)
            return vote, _answer(vote, now, granted=False)
        vote = replace(vote, granted_at=now, copied=max(vote.copied, request.copied))
        return vote, _answer(vote, now, granted=True)
    # Whoever gave this very token back had lost the election: the winner may have it.
    was_given_back = request.token == vote.token and vote.granted_at is None and not vote.is_over
    is_newer = (request.token > vote.token or was_given_back) and not request.gives_back
    may_lead = request.starts or (not vote.is_over and request.copied >= vote.copied)
    if not is_newer or not may_lead or vote.left_s(now) > 0:
        return vote, _answer(vote, now, granted=False)
    vote = Vote(request.token, request.holder, request.node, max(vote.copied, request.copied), granted_at=now)
    return vote, _answer(vote, now, granted=True)


def _answer(vote: Vote, now: float, *, granted: bool) -> VoteAnswer:
    return VoteAnswer(granted, vote.token, vote.node, vote.left_s(now), vote.is_over)


def held_until(granted: Mapping[str, float], voters: int) -> float:
    """Returns until when the lease is held, by the holder's clock.

    ``granted``: when the newest request that each voter has granted was sent.
    """
    majority = voters // 2 + 1
    sent = sorted(granted.values(), reverse=True)
    return sent[majority - 1] + HOLD_S if len(sent) >= majority else float("-inf")


def voters_among(nodes: Iterable[str]) -> tuple[str, ...]:
    """Returns the first nodes, at most ``MOST_VOTERS`` and an odd number: one more would have to agree, too."""
    first = tuple(nodes)[:MOST_VOTERS]
    return first if len(first) % 2 else first[:-1]
