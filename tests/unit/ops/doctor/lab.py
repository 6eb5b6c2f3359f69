"""A cluster of the tests, and answers of healthy nodes to be changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tridock.cluster import Cluster, load_cluster
from tridock.ops.doctor.finding import Finding

GB = 10**9


def make_cluster(folder: Path, slots: int = 2, hosts: int = 2, **settings: object) -> Cluster:
    """Nodes host-1, host-2, ..., the first of which leads."""
    (folder / "lab").write_text("".join(f"host-{number} slots={slots}\n" for number in range(1, hosts + 1)))
    (folder / "lab.yaml").write_text(json.dumps(settings))
    return load_cluster(folder / "lab")


def look(**changes: Any) -> dict[str, Any]:
    """What a healthy node without GPUs says."""
    return {
        "shm": {"bytes": 2 * GB, "free": 2 * GB},
        "disk": {"bytes": 900 * GB, "free": 500 * GB},
        "unwritable": None,
        "memlock": None,
        "files": 1 << 20,
        "cores": 8,
        "gpus": None,
        "infiniband": {"devices": [], "usable": False},
        "nccl_ib_disable": None,
        "accelerator": "cpu",
        "cuda_error": None,
        "code": {"tridock": "a" * 64, "megatron": "b" * 64, "cuda": None},
        "runs": [],
        "port": 20001,
        **changes,
    }


def shown(findings: Iterable[Finding]) -> list[str]:
    """As the report has them, without the reasons."""
    return [str(finding) for finding in findings]
