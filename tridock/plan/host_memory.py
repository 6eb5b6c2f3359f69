"""Memory of a node's host that its ranks need together, for states that are offloaded there. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tridock.errors import count
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout import Plan
from tridock.layout.shape import Shape
from tridock.plan.memory import GIB, StageMemory, memory_of_stages

_ANY_GPU: Final = Gpu("any", memory_mib=1)
"""What is offloaded does not depend on the GPU."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one node's host, besides what programs need themselves."""

    ranks: int
    least: int
    """Offloaded weights and optimizer states, and their buffers."""
    most: int
    """And a copy of a checkpoint that is written in the background."""
    locked: int = 0
    """Memory that one rank locks for transfers to NVMe."""
    nvme: int = 0
    """Bytes on the node's NVMe."""

    def __str__(self) -> str:
        size = f"{self.least / GIB:.1f}" + (f" to {self.most / GIB:.1f}" if self.most > self.least else "")
        nvme = f", and {self.nvme / GIB:.1f} GiB on NVMe" if self.nvme else ""
        return f"{count(self.ranks, 'rank')} of a node need {size} GiB of its host's memory{nvme}"


def host_memory(plan: Plan, memory: Sequence[StageMemory]) -> dict[str, HostMemory]:
    """Returns the memory by node; empty if no rank offloads anything."""
    if not any(stage.offloaded_bytes for stage in memory):
        return {}
    found: dict[str, HostMemory] = {}
    for rank in plan.ranks:
        stage, before = memory[rank.pipeline_parallel_rank], found.get(rank.node, HostMemory(0, 0, 0))
        least = stage.offloaded_bytes
        found[rank.node] = HostMemory(
            before.ranks + 1,
            before.least + least,
            before.most + least + stage.copied_bytes,
            max(before.locked, stage.locked_bytes),
            before.nvme + stage.nvme_bytes,
        )
    return found


def host_memory_of(experiment: Experiment, plan: Plan) -> dict[str, HostMemory]:
    """Returns the memory by node of an experiment that was laid out."""
    slots = min(Counter(rank.node for rank in plan.ranks).values())
    shape = Shape(plan.data_parallel_size, plan.accumulation_steps, slots)
    return host_memory(plan, memory_of_stages(experiment, shape, _ANY_GPU))
