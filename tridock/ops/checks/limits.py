"""Shared memory, disk, limits and cores of a node against the ranks that will run there. Pure."""

import shlex
from collections.abc import Iterator
from typing import Final

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.contracts.node_answers import NodeReport, QuickReport, Space
from tridock.errors import FREE_INODES, OUT_OF_INODES, Problem
from tridock.ops.checks.finding import Finding, fail, warn
from tridock.progress import size_text

SHM_BYTES: Final = 1 << 30
"""For several ranks of a node: NCCL takes some ten MB for each pair of them, data loaders as much as a batch."""
SHM_FREE_BYTES: Final = 1 << 28
DISK_BYTES: Final = 1 << 28
DISK_COMFORT_BYTES: Final = 10 << 30
# A rank's files, its connections to all others (NCCL has some channels), its pipes.
_FILES, _FILES_A_RANK = 1024, 16

_DISK_WHY = "logs and checkpoints go there; a run that cannot write them is lost"
_SHM_WHY = "ranks of a node exchange data in it, and end with a bus error if it is too small"


def space_findings(cluster: Cluster, node: str, report: QuickReport) -> Iterator[Finding]:
    """Shared memory for the node's ranks, disk space for a run's files, and whether they can be written."""
    yield from _shared_memory(cluster, node, report.shm or Space(0, 0))
    disk = report.disk
    todo = "free some space there (docker system df shows Docker's share)"
    if disk is not None and disk.free < DISK_BYTES:
        what = f"has less than {size_text(DISK_BYTES)} of disk space for a run's files"
        yield fail("space", Problem(node, what, _free(disk), todo), _DISK_WHY)
    elif report.unwritable is not None:
        todo = "give the folder to the ssh user there, on a disk that can be written"
        todo = FREE_INODES if report.unwritable == OUT_OF_INODES else todo
        yield fail("space", Problem(node, "cannot write into /workspace/runs", report.unwritable, todo), _DISK_WHY)
    elif disk is not None and disk.free < DISK_COMFORT_BYTES:
        what = f"has less than {size_text(DISK_COMFORT_BYTES)} of disk space for checkpoints"
        yield warn("space", Problem(node, what, _free(disk), todo), _DISK_WHY)


def _shared_memory(cluster: Cluster, node: str, shm: Space) -> Iterator[Finding]:
    ranks = len(cluster.everywhere[node])
    if ranks < 2:
        return
    if shm.bytes < SHM_BYTES:
        what = f"has less than {size_text(SHM_BYTES)} of /dev/shm for {ranks} ranks"
        todo = transport_of(cluster).shared_memory_remedy()
        yield fail("space", Problem(node, what, size_text(shm.bytes), todo), _SHM_WHY)
    elif shm.free < SHM_FREE_BYTES:
        todo = "remove the files of dead processes there (ls -l /dev/shm)"
        what = f"has less than {size_text(SHM_FREE_BYTES)} free in /dev/shm for {ranks} ranks"
        yield fail("space", Problem(node, what, _free(shm), todo), _SHM_WHY)


def limit_findings(cluster: Cluster, node: str, report: NodeReport) -> Iterator[Finding]:
    """Open files for the world's connections, locked memory for RDMA, a core for each rank on the CPU."""
    world, ranks = sum(map(len, cluster.slots.values())), len(cluster.everywhere[node])
    wanted = _FILES + _FILES_A_RANK * world
    if report.files is not None and report.files < wanted:
        todo = f"set container.ulimits.nofile: {max(65536, wanted)} in the settings, then tridock up"
        problem = Problem(node, f"allows few open files for {world} ranks", str(report.files), todo)
        yield warn("limits", problem, "every rank holds connections to all others")
    if report.infiniband.usable and report.memlock is not None:
        todo = "set container.ulimits.memlock: -1 in the settings, then tridock up"
        problem = Problem(node, "limits locked memory", size_text(report.memlock), todo)
        yield fail("limits", problem, "InfiniBand sends from locked memory; NCCL fails to register its buffers")
    for lock in report.build_locks:
        what = "has a lock of torch's extension builder that no process there holds"
        todo = f"remove it if no process of another machine compiles there: rm -- {shlex.quote(lock.path)}"
        problem = Problem(node, what, f"{lock.path}, made {lock.age_s / 60:.0f} min ago", todo)
        yield warn("limits", problem, "a killed process left it; every rank that builds the extension waits for it")
    if not report.on_gpus and report.cores < ranks:
        todo = "give it fewer slots in the hostfile"
        problem = Problem(node, f"has fewer cores than its {ranks} slots", str(report.cores), todo)
        yield warn("limits", problem, "ranks that share a core wait for each other at every step")


def _free(space: Space) -> str:
    return f"{size_text(space.free)} of {size_text(space.bytes)} free"
