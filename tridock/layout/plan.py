"""The plan: the rank map and the batch arithmetic of an experiment on slots."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tridock.experiment import Experiment
from tridock.layout.split import size_of_replica


@dataclass(frozen=True, slots=True)
class Rank:
    """One process: its number in the world, where it runs and its place in the layout."""

    rank: int
    node: str
    slot: int
    local_rank: int
    data_parallel_rank: int
    pipeline_parallel_rank: int = 0
    tensor_parallel_rank: int = 0
    context_parallel_rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """An experiment laid out on slots.

    ``accumulation_steps`` is the number of micro batches that one rank works through in one optimizer step;
    ``tokens_per_step`` counts the tokens of the global batch.
    """

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    accumulation_steps: int
    tokens_per_step: int
    ranks: tuple[Rank, ...]
    virtual_pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1

    @property
    def layout(self) -> str:
        """Short form for tables: ``TP1 PP1 DP2``; with VPP and CP where they are used."""
        parts = [f"TP{self.tensor_model_parallel_size}", f"PP{self.pipeline_model_parallel_size}"]
        if self.virtual_pipeline_model_parallel_size > 1:
            parts.append(f"VPP{self.virtual_pipeline_model_parallel_size}")
        if self.context_parallel_size > 1:
            parts.append(f"CP{self.context_parallel_size}")
        return " ".join([*parts, f"DP{self.data_parallel_size}"])

    def document(self) -> dict[str, Any]:
        """The plan for JSON; a rank's coordinates by their short names."""
        fields = asdict(self)
        fields["ranks"] = [
            {
                "rank": rank.rank,
                "node": rank.node,
                "slot": rank.slot,
                "local_rank": rank.local_rank,
                "pp": rank.pipeline_parallel_rank,
                "dp": rank.data_parallel_rank,
                "cp": rank.context_parallel_rank,
                "tp": rank.tensor_parallel_rank,
            }
            for rank in self.ranks
        ]
        return {"layout": self.layout, **fields}


def lay_out(experiment: Experiment, slots: Mapping[str, Sequence[int]]) -> Plan:
    """The plan of an experiment that is legal on ``slots`` (node name to slot numbers, in the hostfile's order).

    Ranks go node by node and slot by slot, as DeepSpeed's and torch's launchers number them.
    """
    world_size = sum(len(numbers) for numbers in slots.values())
    parallel, batch = experiment.parallel, experiment.batch
    data_parallel = world_size // size_of_replica(experiment)
    samples = batch.samples_per_step(data_parallel)
    return Plan(
        world_size=world_size,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        data_parallel_size=data_parallel,
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=samples,
        accumulation_steps=samples // (batch.micro_batch_size * data_parallel),
        tokens_per_step=samples * experiment.model.seq_length,
        ranks=tuple(_ranks(slots, data_parallel, parallel.tensor_model_parallel_size, parallel.context_parallel_size)),
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
    )


def _ranks(
    slots: Mapping[str, Sequence[int]], data_parallel: int, tensor_parallel: int, context_parallel: int
) -> Iterator[Rank]:
    """Numbers the ranks as DeepSpeed's ``PipeModelDataParallelTopology`` does, and megatron-core (tp-cp-ep-dp-pp).

    Tensor parallel ranks are neighbours, and so on one node where they fit; a pipeline's stages lie furthest apart.
    """
    rank = 0
    for node, numbers in slots.items():
        for local_rank, slot in enumerate(numbers):
            rest, tensor = divmod(rank, tensor_parallel)
            replica, context = divmod(rest, context_parallel)
            stage, data = divmod(replica, data_parallel)
            yield Rank(rank, node, slot, local_rank, data, stage, tensor, context)
            rank += 1
