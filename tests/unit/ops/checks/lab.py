"""A cluster for the tests, and reports of healthy nodes to be changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tridock.cluster.settings import Cluster, load_cluster
from tridock.contracts.node_answers import PROTOCOL, Accelerators, Code, Infiniband, NodeReport, PortAnswer, Space
from tridock.ops.checks.finding import Finding

GB = 10**9


def make_cluster(folder: Path, slots: int = 2, hosts: int = 2, **settings: object) -> Cluster:
    """Nodes host-1, host-2, ..., the first of which leads."""
    (folder / "lab").write_text("".join(f"host-{number} slots={slots}\n" for number in range(1, hosts + 1)))
    (folder / "lab.yaml").write_text(json.dumps(settings))
    return load_cluster(folder / "lab")


def node_report(**changes: Any) -> NodeReport:
    """The report of a healthy node without GPUs."""
    healthy: dict[str, Any] = {
        "protocol": PROTOCOL,
        "shm": Space(2 * GB, 2 * GB),
        "disk": Space(900 * GB, 500 * GB),
        "unwritable": None,
        "memlock": None,
        "files": 1 << 20,
        "cores": 8,
        "accelerators": Accelerators(),
        "infiniband": Infiniband(),
        "nccl_ib_disable": None,
        "built_for": "cpu",
        "cuda_error": None,
        "code": Code("a" * 64, "b" * 64),
        "runs": (),
        "rendezvous": PortAnswer(20001),
    }
    return NodeReport(**{**healthy, **changes})


def shown(findings: Iterable[Finding]) -> list[str]:
    """As the report has them, without the reasons."""
    return [str(finding) for finding in findings]
