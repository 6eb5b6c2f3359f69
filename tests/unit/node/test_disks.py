"""Disks that a run fills: which node says that one is nearly full, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.contracts.events import Event, events_of
from tridock.contracts.lease import HeldLease
from tridock.contracts.node_answers import Space
from tridock.node.agent.node_agent import own_disk
from tridock.node.supervisor.disks import Disks

ROOMY, FULL = Space(100 << 30, 50 << 30), Space(100 << 30, 4 << 30)


def test_a_disk_that_becomes_full_is_an_event_and_another_after_it_had_room(tmp_path: Path) -> None:
    disks = Disks(tmp_path)
    for seen in (ROOMY, FULL, FULL, ROOMY, FULL):
        disks.note({"n1": ROOMY, "n2": seen})
    found = events_of(tmp_path, Event.DISK_NEARLY_FULL)
    assert [(it["node"], it["free_bytes"], it["total_bytes"]) for it in found] == [("n2", 4 << 30, 100 << 30)] * 2


def test_a_node_that_shares_the_heads_disk_leaves_it_to_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tridock.node.agent.node_agent.space", lambda _: FULL)
    assert own_disk(tmp_path, on_head=False) == FULL
    HeldLease.first(tmp_path, "n1", 0.0)
    assert own_disk(tmp_path, on_head=False) is None
    assert own_disk(tmp_path, on_head=True) == FULL
