"""Where a rank of engine ``torch`` stands among the tensor, data and pipeline parallel ones: torch's device mesh.

Ranks are numbered as the plan has them: tensor parallel ranks are neighbours, a pipeline's stages lie furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tridock.experiment.schema import Parallel
from tridock.train.rank.process_group import Ranks

STAGES, COPIES, SHARDS, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"


@dataclass(frozen=True, slots=True)
class Mesh:
    """[stages, copies of the states, ranks that share a copy out, tensor parallel ranks]; made by all ranks at once."""

    whole: DeviceMesh
    ends: dist.ProcessGroup | None
    """The first and the last stage at this rank's place in the others' dimensions; None in between."""

    @classmethod
    def form(cls, parallel: Parallel, ranks: Ranks) -> Self:
        """Makes the groups. A collective."""
        tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        data = ranks.world_size // (tensor * stages)
        # Without sharding every rank has a copy of its own.
        shards = (parallel.data_parallel_shard_size or data) if parallel.strategy == "fsdp" else 1
        shape = (stages, data // shards, shards, tensor)
        whole = init_device_mesh(ranks.device.type, shape, mesh_dim_names=(STAGES, COPIES, SHARDS, TENSOR))
        ends = None
        if stages > 1:
            first, last = (whole.mesh[place].flatten().tolist() for place in (0, -1))
            ends, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in zip(first, last, strict=True)])
        return cls(whole, ends)

    @property
    def data(self) -> DeviceMesh:
        """The ranks that hold the same part of the model, or shards of it."""
        return self.whole[COPIES, SHARDS] if self.size(COPIES) > 1 or self.size(SHARDS) == 1 else self.whole[SHARDS]

    @property
    def tensor(self) -> DeviceMesh:
        return self.whole[TENSOR]

    @property
    def stages(self) -> DeviceMesh:
        return self.whole[STAGES]

    def size(self, name: str) -> int:
        """Ranks along a dimension."""
        return int(self.whole[name].size())

    def place(self, name: str) -> int:
        """This rank's place along a dimension."""
        return int(self.whole.get_local_rank(name))

    @property
    def words(self) -> str:
        """What is shared how, for people."""
        names = {STAGES: "pipeline stages", COPIES: "replicas", SHARDS: "shards", TENSOR: "tensor parallel ranks"}
        return ", ".join(f"{self.size(name)} {word}" for name, word in names.items() if self.size(name) > 1) or "alone"

    @property
    def replica(self) -> int:
        """This rank's data parallel replica."""
        return self.place(COPIES) * self.size(SHARDS) + self.place(SHARDS)

    @property
    def replicas(self) -> int:
        return self.size(COPIES) * self.size(SHARDS)
