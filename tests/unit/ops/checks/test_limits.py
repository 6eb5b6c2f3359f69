"""Shared memory, disk, limits and cores: what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.checks.lab import GB, make_cluster, node_report, shown
from tridock.contracts.node_answers import BuildLock, Infiniband, Space
from tridock.errors import OUT_OF_INODES
from tridock.ops.checks import limits


def test_a_healthy_node_has_nothing_to_be_said(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path)
    assert shown(limits.space_findings(cluster, "host-1", node_report())) == []
    assert shown(limits.limit_findings(cluster, "host-1", node_report())) == []


@pytest.mark.parametrize(
    ("settings", "todo"),
    [
        ({"transport": "compose"}, "set shm_size: 2g in docker-compose.yml, then tridock up"),
        ({"container": {"ipc": "private"}}, "set container.shm_size: 2g in the settings, then tridock up"),
        ({}, "enlarge the host's there: mount -o remount,size=2g /dev/shm"),
    ],
)
def test_dockers_64_mb_of_shared_memory(settings: dict[str, Any], todo: str, tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, **settings)
    small = node_report(shm=Space(64 << 20, 64 << 20))
    assert shown(limits.space_findings(cluster, "host-2", small)) == [
        f"fail  host-2: has less than 1.1 GB of /dev/shm for 2 ranks; got 67.1 MB; {todo}"
    ]


def test_one_rank_alone_shares_nothing(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, slots=1)
    assert shown(limits.space_findings(cluster, "host-2", node_report(shm=None))) == []


def test_one_gibibyte_of_shared_memory_is_enough_and_a_byte_less_is_not(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path)
    for size, said in ((1 << 30, 0), ((1 << 30) - 1, 1)):
        assert len(shown(limits.space_findings(cluster, "host-2", node_report(shm=Space(size, size))))) == said


def test_shared_memory_that_dead_processes_fill(tmp_path: Path) -> None:
    full = node_report(shm=Space(2 * GB, 10_000_000))
    assert shown(limits.space_findings(make_cluster(tmp_path), "host-2", full)) == [
        "fail  host-2: has less than 268.4 MB free in /dev/shm for 2 ranks; got 10.0 MB of 2.0 GB free; "
        "remove the files of dead processes there (ls -l /dev/shm)"
    ]


def test_a_disk_that_is_full_or_nearly(tmp_path: Path) -> None:
    cluster, todo = make_cluster(tmp_path), "free some space there (docker system df shows Docker's share)"
    full = node_report(disk=Space(64_000, 0), unwritable="no space left on device")
    assert shown(limits.space_findings(cluster, "host-2", full)) == [
        f"fail  host-2: has less than 268.4 MB of disk space for a run's files; got 0 kB of 64 kB free; {todo}"
    ]
    little = node_report(disk=Space(900 * GB, 5 * GB))
    assert shown(limits.space_findings(cluster, "host-2", little)) == [
        f"warn  host-2: has less than 10.7 GB of disk space for checkpoints; got 5.0 GB of 900.0 GB free; {todo}"
    ]


def test_a_disk_without_inodes(tmp_path: Path) -> None:
    full = node_report(unwritable=OUT_OF_INODES)
    assert shown(limits.space_findings(make_cluster(tmp_path), "host-2", full)) == [
        "fail  host-2: cannot write into /workspace/runs; got no inodes left; "
        "remove small files on that disk (du --inodes shows where they are)"
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    closed = node_report(unwritable="permission denied")
    assert shown(limits.space_findings(make_cluster(tmp_path), "host-2", closed)) == [
        "fail  host-2: cannot write into /workspace/runs; got permission denied; "
        "give the folder to the ssh user there, on a disk that can be written"
    ]


def test_limits(tmp_path: Path) -> None:
    few = node_report(files=1024, memlock=8 << 20, infiniband=Infiniband(("mlx5_0",), usable=True), cores=1)
    assert shown(limits.limit_findings(make_cluster(tmp_path), "host-2", few)) == [
        "warn  host-2: allows few open files for 4 ranks; got 1024; "
        "set container.ulimits.nofile: 65536 in the settings, then tridock up",
        "fail  host-2: limits locked memory; got 8.4 MB; "
        "set container.ulimits.memlock: -1 in the settings, then tridock up",
        "warn  host-2: has fewer cores than its 2 slots; got 1; give it fewer slots in the hostfile",
    ]


def test_locked_memory_and_cores_are_nothing_to_ranks_that_need_none(tmp_path: Path) -> None:
    plain = node_report(memlock=8 << 20, built_for="cuda", cores=1, files=None)
    assert shown(limits.limit_findings(make_cluster(tmp_path), "host-2", plain)) == []


def test_the_open_files_that_a_large_world_needs(tmp_path: Path) -> None:
    large = make_cluster(tmp_path, slots=8, hosts=512)
    (said,) = shown(limits.limit_findings(large, "host-2", node_report(files=65536)))
    assert said == (
        "warn  host-2: allows few open files for 4096 ranks; got 65536; "
        "set container.ulimits.nofile: 66560 in the settings, then tridock up"
    )


def test_a_lock_that_a_killed_compiler_has_left(tmp_path: Path) -> None:
    left = node_report(build_locks=(BuildLock("/root/my ext/lock", 1200.0),))
    assert shown(limits.limit_findings(make_cluster(tmp_path), "host-2", left)) == [
        "warn  host-2: has a lock of torch's extension builder that no process there holds; "
        "got /root/my ext/lock, made 20 min ago; "
        "remove it if no process of another machine compiles there: rm -- '/root/my ext/lock'"
    ]
