"""Every host gets every piece, the operator's machine sends each about once, and 32 hosts take little longer than 2."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.ops.image.links import simulate
from tridock.ops.image.schedule import OPERATOR, SLOTS, Schedule, Transfer

ROOT = Path(__file__).resolve().parents[4]


def names(hosts: int) -> list[str]:
    return [f"gpu-{number}" for number in range(1, hosts + 1)]


def pieces(count: int) -> list[str]:
    return [f"piece-{number}" for number in range(count)]


def whole(hosts: int, count: int) -> Schedule:
    return Schedule(dict.fromkeys(names(hosts), pieces(count)), {}, names(hosts), 8)


@pytest.mark.parametrize("hosts", [1, 2, 3, 5, 16, 64])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_one_copy_goes_out_and_all_pieces_arrive(hosts: int, count: int) -> None:
    schedule = whole(hosts, count)
    run = simulate(schedule, latency=0.2)
    assert schedule.done
    assert schedule.has == {host: set(pieces(count)) for host in names(hosts)}
    assert run.sent[OPERATOR] == count
    assert run.sent.total() == hosts * count
    arrivals = Counter((transfer.target, transfer.piece) for _, _, transfer in run.transfers)
    assert set(arrivals.values()) == {1}


@pytest.mark.parametrize("count", [16, 32, 100])
def test_32_hosts_take_at_most_half_as_long_again_as_two(count: int) -> None:
    two, many = (simulate(whole(hosts, count)) for hosts in (2, 32))
    assert many.seconds <= 1.5 * two.seconds
    # No host sends much more than the others.
    assert max(many.sent.values()) < 1.5 * count


def test_nobody_gives_what_it_lacks_and_nobody_does_more_than_two_things_at_once() -> None:
    run = simulate(whole(9, 20), latency=0.3)
    arrived: dict[tuple[str, str], float] = {
        (transfer.target, transfer.piece): end for _, end, transfer in run.transfers
    }
    for begin, _, transfer in run.transfers:
        assert transfer.source == OPERATOR or arrived[transfer.source, transfer.piece] <= begin
    for begin, _, _ in run.transfers:
        under_way = [t for start, end, t in run.transfers if start <= begin < end]
        for ends in (Counter(t.source for t in under_way), Counter(t.target for t in under_way)):
            assert max(ends.values()) <= SLOTS


@pytest.mark.parametrize("when", [0.5, 5.0, 20.0, 30.0])
def test_a_host_that_is_lost_delays_only_those_that_fetch_from_it(when: float) -> None:
    undisturbed = simulate(whole(8, 32))
    schedule = whole(8, 32)
    run = simulate(schedule, lost=("gpu-3", when))
    assert schedule.done
    assert schedule.has == {host: set(pieces(32)) for host in names(8) if host != "gpu-3"}
    assert run.seconds <= undisturbed.seconds + 3
    # What the lost host alone had goes out once more.
    assert run.sent[OPERATOR] <= 32 + 2 * SLOTS


def test_a_host_that_reaches_no_other_gets_all_from_here_after_two_attempts() -> None:
    schedule = whole(6, 20)
    run = simulate(schedule, broken=lambda transfer, _: transfer.target == "gpu-2" and transfer.source != OPERATOR)
    assert schedule.done
    assert len([pair for pair in schedule.failures if pair[1] == "gpu-2"]) <= 2
    assert 20 < run.sent[OPERATOR] <= 40
    assert schedule.sources_of("gpu-2") == []


def test_a_host_that_no_other_reaches_still_gets_all() -> None:
    schedule = whole(6, 20)
    run = simulate(schedule, broken=lambda transfer, _: transfer.source == "gpu-2")
    assert schedule.done
    assert all(len(there) == 20 for there in schedule.has.values())
    assert run.sent["gpu-2"] == 0
    # Those that it alone had go out again.
    assert run.sent[OPERATOR] <= 30


def test_a_host_that_gives_nothing_costs_no_second_copy() -> None:
    schedule = Schedule(dict.fromkeys(names(6), pieces(20)), {}, set(names(6)) - {"gpu-1"}, 8)
    run = simulate(schedule)
    assert schedule.has == {host: set(pieces(20)) for host in names(6)}
    assert (run.sent[OPERATOR], run.sent["gpu-1"]) == (20, 0)


def test_where_no_host_reaches_another_each_gets_all_from_here_several_at_once() -> None:
    schedule = whole(4, 10)
    run = simulate(schedule, broken=lambda transfer, _: transfer.source != OPERATOR)
    assert schedule.done
    assert run.sent == {OPERATOR: 40}
    assert len(schedule.failures) <= 8
    schedule = Schedule(dict.fromkeys(names(20), pieces(10)), {}, (), 8)
    assert len(schedule.begin()) == 8


def test_what_an_interrupted_command_left_is_not_sent_again() -> None:
    present = {"gpu-1": pieces(10), "gpu-2": ["piece-3"]}
    missing = {"gpu-1": [], "gpu-2": [p for p in pieces(10) if p != "piece-3"], "gpu-3": [*pieces(10), "own"]}
    schedule = Schedule(missing, present, names(3), 8)
    run = simulate(schedule)
    assert run.sent[OPERATOR] == 1
    assert [len(schedule.has[host]) for host in names(3)] == [10, 10, 11]


def test_a_piece_is_fetched_again_from_elsewhere_after_a_failure() -> None:
    schedule = Schedule({"a": [], "b": [], "c": ["p"]}, {"a": ["p"], "b": ["p"]}, ["a", "b", "c"], 8)
    (first,) = schedule.begin()
    schedule.finish(first, "connection refused")
    (second,) = schedule.begin()
    assert {first.source, second.source} == {"a", "b"}
    schedule.finish(second, "connection refused")
    assert schedule.begin() == [Transfer(OPERATOR, "c", "p")]
    assert schedule.failures == dict.fromkeys([("a", "c"), ("b", "c")], "connection refused")


@pytest.mark.parametrize("seed", range(10))
def test_all_arrives_where_links_and_hosts_fail_at_random(seed: int) -> None:
    chance = random.Random(seed)
    hosts, count = chance.randint(1, 20), chance.randint(1, 30)
    bad = {(a, b) for a in names(hosts) for b in names(hosts) if chance.random() < 0.3}
    gone = (chance.choice(names(hosts)), chance.uniform(0, 40)) if chance.random() < 0.5 else None
    schedule = whole(hosts, count)
    run = simulate(schedule, latency=0.1, lost=gone, broken=lambda t, _: (t.source, t.target) in bad)
    assert schedule.done
    assert all(there == set(pieces(count)) for there in schedule.has.values())
    assert run.sent[OPERATOR] >= count


def test_the_schedule_in_the_docs() -> None:
    run = simulate(Schedule(dict.fromkeys("abc", "1234"), {}, "abc", 8))
    sent: dict[tuple[int, str], list[str]] = {}
    for begin, _, transfer in run.transfers:
        sent.setdefault((int(begin), transfer.source), []).append(f"{transfer.piece} → {transfer.target}")
    rows = [
        "| "
        + " | ".join([f"{begin} to {begin + 2}", *(", ".join(sent.get((begin, host), [])) for host in ("", *"abc"))])
        for begin in (0, 2, 4)
    ]
    text = (ROOT / "docs/cluster.md").read_text()
    assert [row for row in rows if row.replace("|  ", "| ") not in text] == []
    ratio = simulate(whole(32, 32)).seconds / simulate(whole(2, 32)).seconds
    assert f"32 hosts take {ratio:.2f} times as long as two" in text
