"""The lease of a run: one holder at a time, whoever stood still has lost it, no clock of another node counts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tridock.contracts import lease
from tridock.contracts.lease import EXPIRY_S, HeldLease, LeaseLostError, LeaseWatch, newest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    return now


def test_of_many_nodes_one_takes_a_lease(tmp_path: Path) -> None:
    HeldLease.first(tmp_path, "a", 7.0)
    won: list[HeldLease] = []
    barrier = threading.Barrier(8)

    def take(node: str) -> None:
        barrier.wait()
        if (taken := HeldLease.take(tmp_path, 1, node)) is not None:
            won.append(taken)

    threads = [threading.Thread(target=take, args=(f"n{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (taken,) = won
    assert (taken.token, taken.prepared_at, newest(tmp_path)) == (2, 7.0, 2)
    taken.check()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lease-1", ".lease-2"]


def test_whoever_has_lost_the_lease_is_told_who_has_it(tmp_path: Path, clock: list[float]) -> None:
    first = HeldLease.first(tmp_path, "a", 7.0)
    first.renew()
    assert HeldLease.take(tmp_path, 1, "b") is not None
    with pytest.raises(LeaseLostError, match="the supervisor on a was suspended, and b took over the run"):
        first.check()
    first.renew()  # too soon to look
    clock[0] += 2.0
    with pytest.raises(LeaseLostError):
        first.renew()


def test_a_node_that_dies_between_mark_and_claim_leaves_the_run_to_the_next(tmp_path: Path) -> None:
    first = HeldLease.first(tmp_path, "a", 7.0)
    lease.run_folder.write_atomic(tmp_path / ".lease-1", b'{"node": "a", "prepared_at": 7.0, "taken_by": "b"}')
    with pytest.raises(LeaseLostError):
        first.check()
    taken = HeldLease.take(tmp_path, 1, "c")
    assert taken is not None
    assert taken.prepared_at == 7.0


def test_a_run_that_is_started_again_has_a_lease_of_its_own(tmp_path: Path) -> None:
    first, second = HeldLease.first(tmp_path, "a", 7.0), HeldLease.first(tmp_path, "a", 9.0)
    assert (second.token, second.prepared_at) == (2, 7.0)
    with pytest.raises(LeaseLostError):
        first.check()


def test_a_lease_expires_by_the_clock_of_who_watches_it(tmp_path: Path, clock: list[float]) -> None:
    """Whatever times the files have: clocks of nodes differ, and jump."""
    taken = HeldLease.first(tmp_path, "a", 0.0)
    os.utime(tmp_path / ".lease-1", (0, 0))
    watch = LeaseWatch(tmp_path)
    clock[0] += 4.0
    assert watch.look() == 4.0
    taken.renew()
    assert watch.look() == 0.0
    assert watch.renewed
    clock[0] += 4.0
    assert watch.look() == 4.0


def test_a_node_that_was_suspended_itself_starts_watching_again(tmp_path: Path, clock: list[float]) -> None:
    HeldLease.first(tmp_path, "a", 0.0)
    watch = LeaseWatch(tmp_path)
    clock[0] += 10 * EXPIRY_S
    assert watch.look() == 0.0


def test_another_node_that_takes_the_lease_is_no_sign_of_the_first(tmp_path: Path, clock: list[float]) -> None:
    HeldLease.first(tmp_path, "a", 0.0)
    watch = LeaseWatch(tmp_path)
    clock[0] += 4.0
    assert HeldLease.take(tmp_path, 1, "b") is not None
    assert watch.look() == 0.0
    assert (watch.token, watch.renewed) == (2, False)
