"""Links that went down, by the kernel's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.contracts.rank_status import LinkFaults
from tridock.node.agent import rank_status
from tridock.node.agent.links import SYSTEM, link_counters, link_faults
from tridock.node.agent.rank_status import RankMonitor


def interface(system: Path, name: str, downs: int, *, device: bool = False) -> None:
    folder = system / "net" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "carrier_down_count").write_text(f"{downs}\n")
    if device:
        (folder / "device").mkdir(exist_ok=True)


def port(system: Path, downs: int) -> None:
    folder = system / "infiniband/mlx5_0/ports/1/counters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "link_downed").write_text(f"{downs}\n")


def test_this_machine_has_interfaces_with_counters() -> None:
    now = link_counters()
    assert now
    assert now.keys() <= {path.name for path in (SYSTEM / "net").iterdir()} | {it for it in now if ":" in it}
    assert link_faults(now, now) == ()


def test_links_count_from_the_attempts_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "link_counters", lambda: link_counters(tmp_path))
    interface(tmp_path, "eth0", 1, device=True)
    interface(tmp_path, "veth1", 1)  # of another container
    port(tmp_path, 3)
    monitor = RankMonitor(tmp_path, (0,))
    assert monitor.link_faults == ()
    interface(tmp_path, "eth0", 2)
    interface(tmp_path, "veth1", 9)
    interface(tmp_path, "eth1", 9, device=True)  # was not there
    port(tmp_path, 5)
    assert monitor.link_faults == (LinkFaults("eth0", 1), LinkFaults("mlx5_0:1", 2))
    interface(tmp_path, "eth0", 0)  # its driver was loaded again
    assert monitor.link_faults == (LinkFaults("mlx5_0:1", 2),)
    monitor.reset()
    assert monitor.link_faults == ()


def test_a_container_has_interfaces_without_devices(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", 4)
    (tmp_path / "net" / "lo").mkdir()
    (tmp_path / "net" / "bonding_masters").touch()
    assert link_counters(tmp_path) == {"eth0": LinkFaults("eth0", 4)}
