"""From what is seen of ranks and nodes to what is wrong: every rule by an example, and what holds for all of them."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.contracts.events import Cause, Event
from tridock.contracts.rank_status import NODE_SILENCE_S
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.restart import RestartAttempt, refusal
from tridock.node.supervisor.verdict import (
    LOST_S,
    HangLimits,
    RankStatus,
    Verdict,
    build_locked,
    first_death,
    first_gone,
    hung,
    lost_node,
    lost_session,
    overdue_ranks,
    rank_without_peer,
    separate_worlds,
    signal_name,
)

HEALTHY = RankStatus(0, "train", iteration=7, heartbeats=9, code=0, age_s=0.1, alive=True, steps=6, longest_step_s=1.0)
DEFAULT = HangLimits(30)
COLLECTIVE = ["/venv/torch/distributed/distributed_c10d.py:2806 in all_reduce", "/x/trainer.py:1 in step"]
BACKWARD = ["/venv/torch/autograd/graph.py:979 in _engine_run_backward"]
ASTRAY = ["/opt/tridock/train/data/dataset.py:120 in batches", *COLLECTIVE[1:]]


def rank_status(rank: int = 0, **changes: object) -> RankStatus:
    return replace(HEALTHY, rank=rank, **changes)  # type: ignore[arg-type]


def dead(rank: int = 0, status: int | None = signal.SIGKILL, **changes: object) -> RankStatus:
    return rank_status(rank, alive=False, wait_status=status, **{"gone_s": 0.1, **changes})


def observed(rank: int = 0, **changes: object) -> RankStatus:
    return rank_status(rank, phase="observed", iteration=0, **changes)


def gone(rank: int, gone_s: float) -> RankStatus:
    return rank_status(rank, phase="gone", iteration=0, alive=False, gone_s=gone_s)


# ---- programs without heartbeats ------------------------------------------------------------------


def test_a_program_has_no_iterations() -> None:
    seen = {"a": [observed(alive=False, wait_status=signal.SIGKILL, gone_s=0.1)]}
    assert first_death(seen) == Verdict(Cause.RANK_SIGNALLED, "was ended by SIGKILL", "a", 0)


def test_a_rank_that_its_launcher_ended_is_not_the_first() -> None:
    ended = observed(2, alive=False, wait_status=signal.SIGTERM, gone_s=0.1)
    first = Verdict(Cause.RANK_GONE, "was the first to end, and its launcher reports an error", "b", 3)
    assert first_death({"a": [observed(0)], "b": [ended, gone(3, 0.4)]}) == first
    assert first_death({"a": [gone(0, 0.05)], "b": [ended]}) == Verdict(
        Cause.RANK_SIGNALLED, "was ended by SIGTERM", "b", 2, asked_to_end=True
    )


def test_one_that_failed_by_itself_is_the_first_also_if_its_end_was_seen_a_moment_later() -> None:
    """On a busy machine, of the processes that wait for two ranks' ends."""
    ended = observed(0, alive=False, wait_status=signal.SIGTERM, gone_s=1.5)
    itself = observed(1, alive=False, wait_status=1 << 8, gone_s=1.4)
    assert first_death({"a": [ended, itself]}) == Verdict(Cause.RANK_EXITED, "exited with code 1", "a", 1)
    first = Verdict(Cause.RANK_SIGNALLED, "was ended by SIGTERM", "a", 0, asked_to_end=True)
    later = observed(1, alive=False, wait_status=1 << 8, gone_s=0.4)
    assert first_death({"a": [ended, later]}) == first
    for asked in (143 << 8, None):
        assert first_death({"a": [ended, observed(1, alive=False, wait_status=asked, gone_s=1.4)]}) == first


def test_ranks_whose_end_nobody_saw_are_the_launchers_to_judge() -> None:
    seen = {"a": [gone(0, 2.0), gone(1, 3.0)], "b": [observed(2)]}
    assert first_death(seen) is None
    verdict = first_gone(seen, code=7)
    assert verdict is not None
    assert (verdict.rank, verdict.node, verdict.code) == (1, "a", 7)
    assert first_gone({"b": [observed(2)]}) is None


def test_of_a_program_only_its_silence_is_known() -> None:
    """Not which rank the others wait for: the one that writes may be the one that waits."""
    seen = {"a": [observed(0, age_s=70.0)], "b": [observed(1, age_s=1.0, heartbeats=99)]}
    overdue = overdue_ranks(seen, HangLimits(60))
    assert [status.rank for _, status in overdue] == [0]
    reason = "is silent: no output and no processor time for 70 s (limit 60 s)"
    assert hung(seen, overdue, {}, HangLimits(60)) == Verdict(Cause.PROGRAM_SILENT, reason, "a", 0)
    both = {"a": [observed(0, age_s=70.0, heartbeats=3)], "b": [observed(1, age_s=71.0, heartbeats=99)]}
    reason = "is silent, as well as 1 other rank: no output and no processor time for 71 s (limit 60 s)"
    assert hung(both, overdue_ranks(both, HangLimits(60)), {}, HangLimits(60)) == Verdict(
        Cause.PROGRAM_SILENT, reason, "b", 1
    )
    assert Cause.PROGRAM_SILENT.event is Event.RANK_HUNG


def test_where_a_program_is_silent_and_which_rank_others_wait_for() -> None:
    ranks = {"a": [observed(0, age_s=70.0)], "b": [observed(1, age_s=71.0)]}
    overdue = overdue_ranks(ranks, HangLimits(60))

    def found(stacks: dict[int, list[str]]) -> str:
        return str(hung(ranks, overdue, stacks, HangLimits(60)))

    silence = "no output and no processor time for"
    same = f"rank 1 on b is silent at {ASTRAY[0]}, as well as 1 other rank: {silence} 71 s (limit 60 s)"
    assert found({0: ASTRAY, 1: ASTRAY}) == same
    assert found({1: ASTRAY}) == same  # where rank 0 is, is not known
    rank_0 = f"rank 0 on a is silent at {ASTRAY[0]} while others wait in a collective: {silence} 70 s (limit 60 s)"
    assert found({0: ASTRAY, 1: COLLECTIVE}) == rank_0
    ranks["b"] = [observed(1, age_s=59.0)]  # it came to the collective a little later
    overdue = overdue_ranks(ranks, HangLimits(60))
    assert found({0: ASTRAY, 1: COLLECTIVE}) == rank_0


def test_a_program_that_is_stopped_is_not_silent() -> None:
    seen = {"a": [observed(0, age_s=70.0, stopped_s=65.0)]}
    verdict = hung(seen, overdue_ranks(seen, HangLimits(60)), {}, HangLimits(60))
    assert verdict.cause is Cause.RANK_STOPPED
    assert verdict.reason == "is stopped (SIGSTOP, or a debugger); no output and no processor time for 70 s"


# ---- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "cause", "reason"),
    [
        (signal.SIGKILL, Cause.RANK_SIGNALLED, "was ended by SIGKILL after iteration 7"),
        (signal.SIGSEGV | 0x80, Cause.RANK_SIGNALLED, "was ended by SIGSEGV after iteration 7"),
        (40, Cause.RANK_SIGNALLED, "was ended by signal 40 after iteration 7"),
        (3 << 8, Cause.RANK_EXITED, "exited with code 3 after iteration 7"),
        (0, Cause.RANK_EXITED, "exited with code 0 after iteration 7"),
        (None, Cause.RANK_VANISHED, "ended without a message after iteration 7"),
    ],
)
def test_how_a_rank_died(status: int | None, cause: Cause, reason: str) -> None:
    assert first_death({"a": [rank_status(0)], "b": [dead(1, status)]}) == Verdict(cause, reason, "b", 1)
    assert cause.event is Event.RANK_DIED


def test_a_rank_that_the_kernel_killed_for_memory() -> None:
    found = first_death({"a": [dead(1, killed_for_memory=True, iteration=0)]})
    assert found is not None
    assert found.cause is Cause.RANK_KILLED_FOR_MEMORY
    assert str(found) == "rank 1 on a was killed by the kernel, out of memory before its first step"
    # Another signal has another cause.
    assert "SIGSEGV" in str(first_death({"a": [dead(1, signal.SIGSEGV, killed_for_memory=True)]}))


def test_a_rank_that_failed_of_itself_comes_with_its_own_exit_code() -> None:
    look = {"a": [rank_status(3, phase="failed", code=2, age_s=0.5)], "b": [rank_status(4, phase="lost", alive=False)]}
    assert first_death(look) == Verdict(Cause.RANK_FAILED, "failed", "a", 3, 2)


def test_the_first_of_several_is_named() -> None:
    killed, failed = dead(1, gone_s=2.0), rank_status(0, phase="failed", code=4, age_s=1.0)
    found = first_death({"a": [failed], "b": [killed]})
    assert found is not None
    assert (found.cause, found.rank) == (Cause.RANK_SIGNALLED, 1)
    found = first_death({"a": [replace(failed, age_s=3.0)], "b": [killed]})
    assert found is not None
    assert (found.cause, found.rank) == (Cause.RANK_FAILED, 0)


def test_who_only_lost_another_is_not_the_first_and_is_named_only_alone() -> None:
    lost = rank_status(0, phase="lost", code=4, alive=False, gone_s=9.0, age_s=9.0)
    found = first_death({"a": [lost], "b": [dead(1)]})
    assert found is not None
    assert found.rank == 1
    assert first_death({"a": [lost]}) is None
    assert rank_without_peer({"a": [replace(lost, age_s=LOST_S)]}) is None
    assert rank_without_peer({"a": [lost, rank_status(1)]}) == Verdict(
        Cause.RANK_FAILED, "lost another rank", "a", 0, 4
    )


def test_a_rank_that_has_ended_well_is_no_death() -> None:
    ended = rank_status(0, phase="end", alive=False, gone_s=5.0)
    assert first_death({"a": [ended, rank_status(1)]}) is None


statuses = st.builds(
    RankStatus,
    rank=st.integers(0, 7),
    phase=st.sampled_from(("start", "first_step", "train", "eval", "save", "end", "failed", "lost")),
    iteration=st.integers(0, 9),
    heartbeats=st.integers(1, 99),
    code=st.sampled_from([0, 2, 4]),
    age_s=st.floats(0, 5000),
    alive=st.booleans(),
    gone_s=st.floats(0, 100),
    wait_status=st.none() | st.integers(0, 0xFFFF),
    stopped_s=st.floats(0, 100),
    killed_for_memory=st.booleans(),
    steps=st.integers(0, 9),
    longest_step_s=st.floats(0, 500),
)
looks = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.lists(statuses, max_size=4))


@given(looks)
def test_a_death_is_seen_if_and_only_if_there_is_one(look: dict[str, list[RankStatus]]) -> None:
    there = [v for vs in look.values() for v in vs]
    bad = [v for v in there if v.phase == "failed" or (not v.alive and v.phase not in ("end", "lost"))]
    found = first_death(look)
    assert (found is None) == (not bad)
    if found is not None:
        assert found.code > 0  # no failure exits 0
        assert found.node in look
        assert found.rank in [v.rank for v in look[found.node] if v in bad]


@given(looks, st.none() | st.floats(0, 100), st.integers(0, 100))
def test_whoever_is_named_as_hung_lives(look: dict[str, list[RankStatus]], step_s: float | None, hang_s: int) -> None:
    limits = HangLimits(hang_s, step_s)
    late = overdue_ranks(look, limits)
    assert hang_s or not late
    if late:
        found = hung(look, late, {}, limits)
        assert found.code > 0
        assert found.node is not None
        assert found.rank in [v.rank for v in look[found.node] if v.alive]


@given(st.floats(0, 40), st.integers(1, 100))
def test_no_rank_is_late_within_the_limit(step_s: float, hang_s: int) -> None:
    limit = max(hang_s, 3 * step_s)
    for phase in ("train", "eval"):
        known = rank_status(phase=phase, longest_step_s=step_s)
        assert overdue_ranks({"a": [replace(known, age_s=limit)]}, HangLimits(hang_s)) == []
        assert overdue_ranks({"a": [replace(known, age_s=limit + 0.1)]}, HangLimits(hang_s)) != []


# ---- hangs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "limit"), [("start", 1800), ("first_step", 1800), ("save", 1800), ("end", 120)])
def test_starting_saving_and_leaving_take_their_time(phase: str, limit: float) -> None:
    assert overdue_ranks({"a": [rank_status(phase=phase, age_s=limit - 1)]}, DEFAULT) == []
    assert len(overdue_ranks({"a": [rank_status(phase=phase, age_s=limit + 1)]}, DEFAULT)) == 1
    longer = HangLimits(4000)
    assert overdue_ranks({"a": [rank_status(phase=phase, age_s=3999)]}, longer) == []
    assert len(overdue_ranks({"a": [rank_status(phase=phase, age_s=4001)]}, longer)) == 1


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_a_rank_that_has_not_learnt_its_step_time_has_the_limit_of_a_first_step(phase: str) -> None:
    new = rank_status(phase=phase, iteration=1, steps=1, longest_step_s=40.0)
    assert overdue_ranks({"a": [replace(new, age_s=1799.0)]}, DEFAULT) == []
    assert len(overdue_ranks({"a": [replace(new, age_s=1801.0)]}, DEFAULT)) == 1


@pytest.mark.parametrize("phase", ["start", "save"])
def test_ranks_wait_for_one_that_still_reads_or_writes(phase: str) -> None:
    waiting, writing = rank_status(0, phase=phase, age_s=5000.0), rank_status(1, phase=phase, age_s=3.0)
    assert overdue_ranks({"a": [waiting, writing]}, DEFAULT) == []
    assert overdue_ranks({"a": [waiting], "b": [replace(writing, age_s=1900.0)]}, DEFAULT) != []
    assert overdue_ranks({"a": [waiting, replace(writing, alive=False)]}, DEFAULT) != []


def test_a_rank_that_is_stopped_is_late_in_every_phase() -> None:
    assert len(overdue_ranks({"a": [rank_status(phase="start", stopped_s=31.0)]}, DEFAULT)) == 1


def named(*ranks: RankStatus, stacks: dict[int, list[str]] | None = None) -> str:
    look = {"a": list(ranks)}
    return str(hung(look, overdue_ranks(look, DEFAULT), stacks or {}, DEFAULT))


def test_a_stopped_rank_is_named_before_those_who_wait_for_it() -> None:
    waiting, stopped = rank_status(0, age_s=31.0, heartbeats=8), rank_status(1, age_s=29.0, stopped_s=28.0)
    assert named(waiting, stopped, stacks={0: COLLECTIVE}) == (
        "rank 1 on a is stopped (SIGSTOP, or a debugger); no progress for 31 s (limit 30 s), phase train after "
        "iteration 7"
    )


def test_a_rank_that_is_behind_is_named() -> None:
    ahead, behind = rank_status(0, age_s=31.0), rank_status(1, age_s=32.0, heartbeats=8, iteration=6)
    assert named(ahead, behind, stacks={0: COLLECTIVE, 1: BACKWARD}) == (
        "rank 1 on a hangs while others wait for it at /venv/torch/autograd/graph.py:979 in _engine_run_backward; "
        "no progress for 32 s (limit 30 s), phase train after iteration 6"
    )


def test_of_ranks_that_are_equally_far_the_one_outside_a_collective_is_named() -> None:
    ranks = [rank_status(n, age_s=31.0) for n in range(3)]
    assert named(*ranks, stacks={0: COLLECTIVE, 1: BACKWARD, 2: ASTRAY}) == (
        "rank 2 on a hangs while others wait for it at /opt/tridock/train/data/dataset.py:120 in batches; "
        "no progress for 31 s (limit 30 s), phase train after iteration 7"
    )


@pytest.mark.parametrize("frames", [COLLECTIVE, ASTRAY])
def test_where_all_stand_alike_nobody_is_blamed(frames: list[str]) -> None:
    found = named(rank_status(0, age_s=31.0), rank_status(1, age_s=31.0), stacks={0: frames, 1: frames})
    assert found.startswith("rank 0 on a hangs, as do all 2 ranks: a collective that does not end at ")


def test_a_rank_alone() -> None:
    assert named(rank_status(0, age_s=31.0)) == (
        "rank 0 on a hangs; no progress for 31 s (limit 30 s), phase train after iteration 7"
    )


# ---- nodes ---------------------------------------------------------------------------------------


def test_a_node_that_is_silent_for_too_long_is_lost() -> None:
    assert lost_node({"a": NODE_SILENCE_S - 0.1, "b": 0.0}, {}) is None
    found = lost_node({"a": 1.0, "b": 20.4}, {"b": "ssh: connect to host b port 2222: Connection refused"})
    assert str(found) == "b has not answered for 20 s (ssh: connect to host b port 2222: Connection refused)"
    assert str(lost_node({"a": 1.0, "b": 20.4, "c": 22.0}, {})) == "c has not answered for 22 s, as has b"


def test_a_session_that_the_launcher_lost() -> None:
    log = b"node-1: iteration 3\npdsh@node-1: node-2: ssh exited with exit code 255\nnode-1: more\n"
    found = lost_session(log)
    assert found is not None
    assert found.cause is Cause.SSH_SESSION_LOST
    assert str(found) == "node-2 dropped the ssh session in which its ranks were started"
    # Any other code is that of the launcher's own part there.
    assert lost_session(log.replace(b"255", b"4")) is None


def test_signals_have_names() -> None:
    assert [signal_name(number) for number in (9, 11, 40)] == ["SIGKILL", "SIGSEGV", "signal 40"]


# ---- restarts ------------------------------------------------------------------------------------


def supervision(most: int, window: float | None = None) -> Supervision:
    return Supervision("a", {"a": (0,)}, (), 1, 30.0, max_restarts=most, restart_window_s=window)


def test_no_more_restarts_than_allowed() -> None:
    made = [RestartAttempt(at, before=10 * at, reached=10 * at + 5) for at in (1, 2)]
    assert refusal(supervision(3), made, now=3.0) is None
    assert refusal(supervision(2), made, now=3.0) == "restarted 2 times, and restart.max is 2"


def test_only_those_within_the_window_count_unless_they_did_not_help() -> None:
    helped, useless = RestartAttempt(1.0, before=10, reached=11), RestartAttempt(1.0, before=10, reached=10)
    assert refusal(supervision(1, window=60.0), [helped], now=30.0) is not None
    assert refusal(supervision(1, window=60.0), [helped], now=90.0) is None
    assert refusal(supervision(1, window=60.0), [useless], now=90.0) is not None


@given(st.lists(st.builds(RestartAttempt, st.floats(0, 100), st.integers(0, 9), st.integers(0, 9))), st.integers(1, 5))
def test_without_a_window_there_are_never_more_than_allowed(made: list[RestartAttempt], most: int) -> None:
    assert (refusal(supervision(most), made, now=200.0) is None) == (len(made) < most)


def test_supervision_is_data() -> None:
    full = Supervision("a", {"a": (0, 1), "b": (2,)}, ("b",), 20000, 30.0, 3, 3600.0, "/x/checkpoints")
    assert Supervision.from_json(full.to_json()) == full
    assert full.watched == ("a", "b")


@pytest.mark.parametrize(
    ("a", "b", "per_slot", "node"),
    [
        ([observed(0, world_size=1)], [observed(0, world_size=1)], False, "a"),
        ([observed(0, world_size=1, alive=False)], [observed(0, world_size=1)], False, None),
        ([observed(0, world_size=2)], [observed(1, world_size=2)], False, None),
        ([observed(0, world_size=2)], [observed(0, world_size=1)], False, None),  # an inference server beside
        ([observed(0, world_size=1)], [], False, None),  # the other one has not begun yet
        ([observed(0)], [observed(0)], False, None),  # a program that says nothing of its world
        ([observed(0, world_size=2)], [observed(1, world_size=2, inner_world_size=1)], True, "b"),
        ([observed(0, world_size=2)], [observed(1, world_size=2, inner_world_size=1)], False, None),
    ],
)
def test_worlds_that_do_not_know_of_each_other(
    a: list[RankStatus], b: list[RankStatus], per_slot: bool, node: str | None
) -> None:
    found = separate_worlds({"a": a, "b": b}, {"a": (0,), "b": (1,)}, per_slot=per_slot)
    assert (found.node if found else None) == node
    assert found is None or found.code == 2
    assert separate_worlds({"a": a}, {"a": (0,)}, per_slot=False) is None


def test_a_rank_that_waits_for_a_lock_that_nothing_holds() -> None:
    seen = {"a": [observed(0, alive=False), observed(1)], "b": [observed(2)]}
    assert build_locked(seen, {}) is None
    assert build_locked(seen, {0: "/x/lock"}) is None  # it has ended since
    found = build_locked(seen, {1: "/x/lock", 2: "/y/lock"})
    assert found is not None
    assert (
        str(found) == "rank 1 on a waits for /x/lock, a lock of torch's extension builder that no process there holds"
    )
    assert (found.cause, found.path, found.cause.event) == (Cause.BUILD_LOCKED, "/x/lock", Event.RANK_HUNG)
