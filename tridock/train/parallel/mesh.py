"""The device mesh of engine ``torch``: pipeline, data and tensor parallel dimensions.

Ranks are numbered as in the plan: tensor parallel ranks are adjacent; pipeline stages, or replicas, are furthest apart.
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tridock.experiment.schema import Parallel
from tridock.train.rank.process_group import Ranks

STAGES, REPLICAS, SHARDS, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
NAMES: Final = (STAGES, REPLICAS, SHARDS, TENSOR)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh [stages, replicas, shards, tensor parallel ranks]."""

    whole: DeviceMesh
    ends: dist.ProcessGroup | None
    """The group of the first and last stage with this rank's other coordinates; None in the stages between."""

    @classmethod
    def form(cls, parallel: Parallel, ranks: Ranks) -> Self:
        """Creates the process groups. A collective."""
        tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        data = ranks.world_size // (tensor * stages)
        # Without sharding every rank has its own replica.
        shards = (parallel.data_parallel_shard_size or data) if parallel.strategy == "fsdp" else 1
        if parallel.use_tp_pp_dp_mapping:
            numbers = torch.arange(ranks.world_size).view(data // shards, shards, stages, tensor).permute(2, 0, 1, 3)
            numbers = numbers.contiguous()
        else:
            numbers = torch.arange(ranks.world_size).view(stages, data // shards, shards, tensor)
        whole = DeviceMesh(ranks.device.type, numbers, mesh_dim_names=NAMES)
        ends = None
        if stages > 1:
            first, last = (whole.mesh[place].flatten().tolist() for place in (0, -1))
            ends, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in zip(first, last, strict=True)])
        return cls(whole, ends)

    @property
    def data(self) -> DeviceMesh:
        """The ranks that hold replicas or shards of the same part of the model."""
        return self.whole[REPLICAS, SHARDS] if self.size(REPLICAS) > 1 or self.size(SHARDS) == 1 else self.whole[SHARDS]

    @property
    def tensor(self) -> DeviceMesh:
        return self.whole[TENSOR]

    @property
    def stages(self) -> DeviceMesh:
        return self.whole[STAGES]

    def size(self, name: str) -> int:
        return int(self.whole.size(NAMES.index(name)))

    def group(self, name: str) -> dist.ProcessGroup:
        return self.whole.get_group(name)

    def coordinate(self, name: str) -> int:
        return int(self.whole.get_local_rank(name))

    @property
    def description(self) -> str:
        """A line that describes the layout, to print."""
        names = {STAGES: "pipeline stages", REPLICAS: "replicas", SHARDS: "shards", TENSOR: "tensor parallel ranks"}
        return (
            ", ".join(f"{self.size(name)} {label}" for name, label in names.items() if self.size(name) > 1) or "alone"
        )

    @property
    def replica(self) -> int:
        """Index of this rank's data parallel replica."""
        return self.coordinate(REPLICAS) * self.size(SHARDS) + self.coordinate(SHARDS)

    @property
    def replicas(self) -> int:
        return self.size(REPLICAS) * self.size(SHARDS)
