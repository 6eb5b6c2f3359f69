"""Ranks of one run on several nodes of this machine, each with a workspace of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.ranks import free_port, process, rank_environment
from tests.patience import WORK_S


def run_on(
    nodes: Sequence[str],
    folders: Mapping[str, Path],
    argvs: Mapping[str, Sequence[str]],
    env: Mapping[str, str],
    imports: str | None,
    code: int = 0,
) -> str:
    """Runs a rank on each of ``nodes``, whose run folder and argv are given by node; returns what all print.

    All end with this exit ``code``.
    """
    port, processes, outputs = free_port(), [], []
    for rank, node in enumerate(nodes):
        outputs.append(folders[node] / f"output-{rank}")
        where = {
            "RANK": rank, "LOCAL_RANK": rank - nodes.index(node), "WORLD_SIZE": len(nodes), "MASTER_PORT": port,
            "LOCAL_WORLD_SIZE": nodes.count(node), "MASTER_ADDR": "127.0.0.1", "CUDA_DEVICE_MAX_CONNECTIONS": 1,
        }  # fmt: skip
        own = rank_environment() | {key: str(value) for key, value in where.items()} | dict(env)
        processes.append(process(argvs[node], own, outputs[-1], outputs[-1].with_suffix(".err"), imports))
    try:
        codes = [it.wait(WORK_S) for it in processes]
    finally:
        for it in processes:
            it.kill()
            it.wait()
    said = "".join(path.read_text() + path.with_suffix(".err").read_text() for path in outputs)
    assert codes == [code] * len(nodes), said
    return said
