"""What the plan is told of a cluster: by the user, by the settings beside the hostfile, by the hosts themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.cluster import Cluster, load_cluster
from tridock.errors import Problem, RequestError
from tridock.gpus import Gpu, find_gpu
from tridock.plan import Assumptions

if TYPE_CHECKING:  # `tridock plan` contacts nobody, and needs no ssh
    from tridock.ops.hosts.session import Session


def slots_of(
    hosts: Path | None, include: str = "", exclude: str = "", nodes: int | None = None, gpus_per_node: int = 8
) -> tuple[Cluster | None, Mapping[str, Sequence[int]]]:
    """The slots of a hostfile and its cluster; or of so many nodes that nothing else is known of."""
    if hosts is not None and nodes is None:
        cluster = load_cluster(hosts, include=include, exclude=exclude)
        return cluster, cluster.slots
    if hosts is not None or nodes is None:
        got, todo = ("both" if hosts is not None else ""), "give a DeepSpeed hostfile, or a number of --nodes"
        raise RequestError(Problem("--hosts", "or --nodes says what the cluster is", got, todo))
    for option, number in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if number < 1:
            raise RequestError(Problem(option, "must be at least 1", str(number), "give a number"))
    return None, {f"node-{number}": range(gpus_per_node) for number in range(nodes)}


def told(
    cluster: Cluster | None,
    gpu: str | None = None,
    network_gbit: float | None = None,
    tflops: float | None = None,
    tokens: float | None = None,
) -> Assumptions:
    """From the command line's words, and where they are silent from the settings. Nothing is contacted."""
    numbers = {"--network-gbit": network_gbit, "--tflops": tflops, "--tokens": tokens}
    problems = [
        Problem(option, "must be a number above 0", f"{value:g}", "give one, as in 300e9")
        for option, value in numbers.items()
        if value is not None and not (value > 0 and math.isfinite(value))
    ]
    if problems:
        raise RequestError(problems)
    settings = None if cluster is None else cluster.settings
    chosen: Gpu | None = None
    if gpu is not None:
        chosen = find_gpu(gpu, "--gpu")
    elif settings is not None and settings.gpu is not None:
        chosen = find_gpu(settings.gpu, "gpu")
    if network_gbit is None and settings is not None:
        network_gbit = settings.network_gbit
    return Assumptions(chosen, network_gbit, tflops, tokens)


def with_hosts_gpu(assumptions: Assumptions, session: Session) -> Assumptions:
    """Where no GPU is named: the one with the least memory of those that the hosts report."""
    if assumptions.gpu is not None:
        return assumptions
    found = [state.gpu for state in session.states().values() if state.gpu is not None]
    return replace(assumptions, gpu=min(found, key=lambda gpu: gpu.memory_mib)) if found else assumptions
