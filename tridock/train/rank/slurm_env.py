"""A rank's place where Slurm itself has started it: plain ``srun``, or ``deepspeed --launcher slurm``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tridock.contracts import environment


def place_in_step(env: Mapping[str, str]) -> dict[str, str]:
    """What torch's launchers would have set (RANK, WORLD_SIZE, …), from a task's own variables.

    Nothing where a launcher has set it, and nothing for a process that is not one of as many tasks as the run has
    ranks: Slurm's variables stand in every shell of a job.
    """
    if "RANK" in env or "SLURM_PROCID" not in env or env.get("SLURM_NTASKS") != env.get(environment.WORLD_SIZE):
        return {}
    here = _tasks_of_nodes(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    node = int(env.get("SLURM_NODEID", "0"))
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(here[node] if node < len(here) else 1),
    }


def _tasks_of_nodes(text: str) -> list[int]:
    """``2(x3),1``: two on each of three nodes, one on the fourth."""
    return [int(found[1]) for found in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(found[2] or 1))]
