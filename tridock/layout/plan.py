"""The plan: the rank map and the batch arithmetic of an experiment on slots."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, Self

from tridock.experiment import Experiment
from tridock.experiment.schema import Parallel
from tridock.layout.split import size_of_replica

Slots = Mapping[str, Sequence[int]]
"""Node name to slot numbers, in the hostfile's order."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process: its global rank, where it runs and its coordinates in the layout."""

    rank: int
    node: str
    slot: int
    local_rank: int
    pipeline_parallel_rank: int
    data_parallel_rank: int
    context_parallel_rank: int
    tensor_parallel_rank: int


_SHORT: Final = {f"{name}_parallel_rank": f"{name[0]}p" for name in ("pipeline", "data", "context", "tensor")}
"""Short names of the coordinates in ``plan.json``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """An experiment laid out on slots.

    ``accumulation_steps`` is the number of micro batches that one rank processes in one optimizer step;
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
    decoder_first_pipeline_num_layers: int = 0
    """Layers of the first stage, and of the last; 0: as many as those in between."""
    decoder_last_pipeline_num_layers: int = 0
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 0
    """0 without a mixture of experts."""

    @property
    def layout(self) -> str:
        """Short form for tables: ``TP1 PP1 DP2``; with all that :func:`layout_label` adds."""
        return layout_label(self, self.data_parallel_size)

    def document(self) -> dict[str, Any]:
        """Returns the plan for JSON, a rank's coordinates under their short names."""
        plan = {field.name: getattr(self, field.name) for field in fields(self)}
        names = [field.name for field in fields(Rank)]
        keys, values = [_SHORT.get(name, name) for name in names], attrgetter(*names)
        ranks = [dict(zip(keys, values(rank), strict=True)) for rank in self.ranks]
        return {"layout": self.layout, **plan, "ranks": ranks}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Parses :meth:`document`. Raises KeyError, TypeError or ValueError for anything else."""
        ranks = (
            {name: entry[_SHORT.get(name, name)] for name in (field.name for field in fields(Rank))}
            for entry in document["ranks"]
        )
        sizes = {field.name: int(document[field.name]) for field in fields(cls) if field.name != "ranks"}
        return cls(ranks=tuple(Rank(**rank) for rank in ranks), **sizes)


def layout_label(sizes: Plan | Parallel, data_parallel_size: int) -> str:
    """Returns ``TP2 PP4 DP8``; with VPP, CP, EP and ETP if they are used, and FIRST and LAST for own numbers of layers
    of the first and last stage."""
    tensor = sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    optional = {
        "VPP": (sizes.virtual_pipeline_model_parallel_size, 1),
        "FIRST": (sizes.decoder_first_pipeline_num_layers or 0, 0),
        "LAST": (sizes.decoder_last_pipeline_num_layers or 0, 0),
        "CP": (sizes.context_parallel_size, 1),
        "EP": (sizes.expert_model_parallel_size, 1),
    }
    used = "".join(f"{name}{size} " for name, (size, default) in optional.items() if size > default)
    used += "" if tensor == sizes.tensor_model_parallel_size else f"ETP{tensor} "
    return f"TP{sizes.tensor_model_parallel_size} PP{sizes.pipeline_model_parallel_size} {used}DP{data_parallel_size}"


def size_of_world(slots: Slots) -> int:
    return sum(map(len, slots.values()))


def slots_per_node(slots: Slots) -> int:
    """Returns the slots of the node with the fewest."""
    return min(map(len, slots.values()), default=0)


def lay_out(experiment: Experiment, slots: Slots) -> Plan:
    """Returns the plan of a legal experiment on ``slots``.

    Ranks go node by node and slot by slot, as DeepSpeed's and torch's launchers number them.
    """
    world_size = size_of_world(slots)
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
        accumulation_steps=batch.accumulation_steps(data_parallel),
        tokens_per_step=samples * experiment.model.seq_length,
        ranks=tuple(_ranks(slots, data_parallel, parallel)),
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        decoder_first_pipeline_num_layers=parallel.decoder_first_pipeline_num_layers or 0,
        decoder_last_pipeline_num_layers=parallel.decoder_last_pipeline_num_layers or 0,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_size if experiment.model.num_moe_experts else 0,
    )


def _ranks(slots: Slots, data_parallel: int, parallel: Parallel) -> Iterator[Rank]:
    """Numbers the ranks as DeepSpeed's ``PipeModelDataParallelTopology`` does, and megatron-core (tp-cp-ep-dp-pp).

    Tensor parallel ranks are neighbours, so they share a node if they fit. The stages of a pipeline are furthest
    apart, or the replicas are (``use_tp_pp_dp_mapping``, tp-cp-ep-pp-dp).
    """
    rank = 0
    for node, numbers in slots.items():
        for local_rank, slot in enumerate(numbers):
            rest, tensor = divmod(rank, parallel.tensor_model_parallel_size)
            rest, context = divmod(rest, parallel.context_parallel_size)
            if parallel.use_tp_pp_dp_mapping:
                data, stage = divmod(rest, parallel.pipeline_model_parallel_size)
            else:
                stage, data = divmod(rest, data_parallel)
            yield Rank(rank, node, slot, local_rank, stage, data, context, tensor)
            rank += 1
