"""The vote on who supervises a run: never two holders, whatever the network, the clocks and the nodes do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tridock.contracts.vote import HOLD_S, LEASE_S, Vote, VoteAnswer, VoteRequest, decide, held_until, voters_among

VOTERS, SUPERVISORS = 3, 3
PICK = st.integers(0, 10**6)


@dataclass
class Clock:
    """A node's clock: an arbitrary zero, a tenth too fast or too slow at most."""

    rate: float
    zero: float

    def at(self, now: float) -> float:
        return self.zero + self.rate * now


@dataclass
class Supervisor:
    """A supervisor, which may be gone: its time then counts as if it still acted."""

    clock: Clock
    holder: str
    token: int = 0
    granted: dict[int, float] = field(default_factory=dict)

    def holds(self, now: float) -> bool:
        return self.token > 0 and held_until(self.granted, VOTERS) > self.clock.at(now)


class Protocol(RuleBasedStateMachine):
    """Requests and answers are delayed, lost, doubled and reordered; voters restart; supervisors come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.names = 0.0, 0
        self.votes = [Vote() for _ in range(VOTERS)]
        self.clocks = [Clock(1.0, 0.0) for _ in range(VOTERS)]
        self.supervisors = [Supervisor(Clock(1.0, 0.0), f"s{number}") for number in range(SUPERVISORS)]
        self.holders: dict[int, str] = {}
        self.have_held: set[str] = set()
        self.late_requests: list[tuple[int, int, VoteRequest, float]] = []
        self.late_answers: list[tuple[int, int, VoteRequest, float]] = []

    @initialize(rates=st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=6, max_size=6))
    def set_clocks(self, rates: list[float]) -> None:
        clocks = [Clock(rate, 1e5 * number) for number, rate in enumerate(rates)]
        self.clocks = clocks[:VOTERS]
        for supervisor, clock in zip(self.supervisors, clocks[VOTERS:], strict=True):
            supervisor.clock = clock

    @rule(
        seconds=st.sampled_from([0.0, 1.0, 2.0, HOLD_S, LEASE_S - 1.0, LEASE_S, 40.0]),
        who=st.integers(0, SUPERVISORS - 1),
        fates=st.tuples(*[st.sampled_from([*["heard"] * 5, "answer lost", "answer late", "late"])] * VOTERS),
        iteration=st.sampled_from([0, 0, 1]),
        starts=st.booleans(),
        behind=st.sampled_from([0, 0, 1]),
    )
    def ask(self, seconds: float, who: int, fates: tuple[str, ...], iteration: int, starts: bool, behind: int) -> None:
        """Later, the supervisor renews its lease, or asks for the next one that it knows of under a new name."""
        self.now += seconds
        supervisor = self.supervisors[who]
        if not supervisor.holds(self.now):
            self.names += 1
            token = max(1, max(vote.token for vote in self.votes) + 1 - behind)
            supervisor.token, supervisor.holder, supervisor.granted = token, f"s{who}-{self.names}", {}
        request = VoteRequest(supervisor.token, supervisor.holder, f"n{who}", (9, iteration), starts)
        sent = supervisor.clock.at(self.now)
        for voter, fate in enumerate(fates):
            if fate == "late":
                self.late_requests.append((who, voter, request, sent))
            else:
                self._arrives(who, voter, request, sent, fate)

    @rule(who=st.integers(0, SUPERVISORS - 1), over=st.booleans(), late=st.booleans())
    def give_back(self, who: int, over: bool, late: bool) -> None:
        """It stops acting first. One that has held the lease gives it back only because the run is over."""
        supervisor = self.supervisors[who]
        over = over or supervisor.holder in self.have_held
        request = VoteRequest(supervisor.token, supervisor.holder, f"n{who}", (9, 0), gives_back=True, is_over=over)
        supervisor.token, supervisor.granted = 0, {}
        for voter in range(VOTERS):
            if late:
                self.late_requests.append((who, voter, request, 0.0))
            else:
                self._arrives(who, voter, request, 0.0, "heard")

    @rule(which=PICK, again=st.booleans(), fate=st.sampled_from(["heard", "answer late"]))
    @precondition(lambda self: self.late_requests)
    def a_late_request_arrives(self, which: int, again: bool, fate: str) -> None:
        index = which % len(self.late_requests)
        self._arrives(*(self.late_requests[index] if again else self.late_requests.pop(index)), fate)

    @rule(which=PICK)
    @precondition(lambda self: self.late_answers)
    def a_late_answer_arrives(self, which: int) -> None:
        self._counts(*self.late_answers.pop(which % len(self.late_answers)))

    @rule(voter=st.integers(0, VOTERS - 1))
    def a_voter_restarts(self, voter: int) -> None:
        """It does not know when it granted: it begins to count again."""
        if self.votes[voter].granted_at is not None:
            self.votes[voter] = replace(self.votes[voter], granted_at=self.clocks[voter].at(self.now))

    def _arrives(self, who: int, voter: int, request: VoteRequest, sent: float, fate: str) -> None:
        self.votes[voter], answer = decide(self.votes[voter], request, self.clocks[voter].at(self.now))
        if answer.granted and fate == "answer late":
            self.late_answers.append((who, voter, request, sent))
        elif answer.granted and fate == "heard":
            self._counts(who, voter, request, sent)

    def _counts(self, who: int, voter: int, request: VoteRequest, sent: float) -> None:
        supervisor = self.supervisors[who]
        if supervisor.token and request.holder == supervisor.holder:
            supervisor.granted[voter] = max(sent, supervisor.granted.get(voter, sent))

    @invariant()
    def one_holder(self) -> None:
        holders = [supervisor for supervisor in self.supervisors if supervisor.holds(self.now)]
        assert len(holders) <= 1
        self.have_held |= {one.holder for one in holders}
        assert all(self.holders.setdefault(one.token, one.holder) == one.holder for one in holders)


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


def test_the_loser_of_an_election_leaves_its_vote_to_the_winner() -> None:
    """Otherwise the winner would miss it for as long as it leads, and the run would end with the next node lost."""
    vote, _ = decide(Vote(1, "old", granted_at=0.0), ask(2, "loser"), 20.0)
    assert not decide(vote, ask(2, "winner"), 20.1)[1].granted
    vote, _ = decide(vote, ask(2, "loser", gives_back=True), 21.0)
    vote, answer = decide(vote, ask(2, "winner"), 21.1)
    assert answer.granted
    assert not decide(vote, ask(2, "loser"), 21.2)[1].granted
    over, _ = decide(vote, ask(2, "winner", gives_back=True, is_over=True), 22.0)
    assert not decide(over, ask(2, "loser"), 22.1)[1].granted


def ask(token: int, holder: str, copied: tuple[int, int] = (1, 0), **fields: bool) -> VoteRequest:
    return VoteRequest(token, holder, f"node of {holder}", copied, **fields)


def test_a_lease_that_is_renewed_is_refused_to_others_until_it_expires() -> None:
    vote, answer = decide(Vote(), ask(1, "a"), 0.0)
    assert answer.granted
    vote, answer = decide(vote, ask(1, "a"), 10.0)
    assert answer.granted
    vote, answer = decide(vote, ask(2, "b"), 10.0 + LEASE_S - 0.1)
    assert (answer.granted, answer.node) == (False, "node of a")
    assert answer.left_s == pytest.approx(0.1)
    vote, answer = decide(vote, ask(2, "b"), 10.0 + LEASE_S)
    assert (answer.granted, answer.token) == (True, 2)
    assert not decide(vote, ask(1, "a"), 100.0)[1].granted


def test_an_older_copy_does_not_lead() -> None:
    vote, _ = decide(Vote(), ask(1, "a"), 0.0)
    vote, _ = decide(vote, ask(1, "a", (1, 40)), 1.0)
    assert not decide(vote, ask(2, "b", (1, 20)), 99.0)[1].granted
    assert decide(vote, ask(2, "c", (1, 40)), 99.0)[1].granted


def test_a_run_that_is_over_is_only_started_by_its_user() -> None:
    vote, _ = decide(Vote(), ask(1, "a"), 0.0)
    vote, _ = decide(vote, ask(1, "a", gives_back=True, is_over=True), 1.0)
    assert decide(vote, ask(2, "b"), 2.0)[1] == VoteAnswer(False, 1, "node of a", 0.0, True)
    assert decide(vote, ask(2, "b", starts=True), 2.0)[1].granted


def test_the_holder_s_time_is_over_first() -> None:
    """By clocks that are a tenth wrong, the holder's too slow and the voter's too fast."""
    assert HOLD_S / 0.9 < LEASE_S / 1.1


def test_the_majority_of_the_newest_grants_counts() -> None:
    assert held_until({"a": 5.0, "b": 3.0}, 3) == 3.0 + HOLD_S
    assert held_until({"a": 5.0, "b": 3.0, "c": 4.0}, 3) == 4.0 + HOLD_S
    assert held_until({"a": 5.0}, 3) == float("-inf")


def test_the_voters_are_an_odd_number_of_the_first_nodes() -> None:
    assert voters_among("abc") == ("a", "b", "c")
    assert voters_among("abcd") == ("a", "b", "c")
    assert voters_among("abcdefgh") == ("a", "b", "c", "d", "e")
