"""An experiment with small sizes and the same program, for `tridock rehearse`. Pure.

The engine, the strategy, the layout's dimensions and every choice of the model stay; the engine's own rules decide
whether the small sizes are legal.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from tridock.differences import Difference, differences, flattened
from tridock.engines.deepspeed_options import PASSED
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.experiment.deepspeed_json import options
from tridock.experiment.schema import Parallel
from tridock.layout.split import divisors, size_of_replica
from tridock.plan.legality import layout_problems

ITERATIONS: Final = 24
INTERVAL: Final = 8
"""Iterations between the checkpoints of a rehearsal."""
_MOST: Final = 16
"""Largest size of a dimension of the layout."""
_TOKENS: Final = 64
_HEADS: Final = 4
_HEAD_SIZES: Final = (16, 32, 64, 128)
_OMITTED: Final[Mapping[str, str]] = {
    "model.transformer_impl": "TransformerEngine has no kernels for CPUs: megatron-core's own layers were trained",
    "model.fp8": "TransformerEngine has no kernels for CPUs",
    "parallel.tp_comm_overlap": "it needs CUDA multicast",
    "train.tf32": "CPUs have no TensorFloat-32",
    "train.checkpoint_copies": "there is one node",
    "train.checkpoint_folder": "the rehearsal saves in its own run folder",
    "train.load": "the small model has other shapes; it started from random weights",
    "launch.launcher": "the ranks start on this machine, as with tridock train",
    "launch.master_port": "a free port of this machine is used",
}
"""Fields that a rehearsal changes, or that have no effect in it, and why."""
_IDLE: Final = ("train.tf32", "train.checkpoint_copies", "launch.launcher")
"""Those that stay, without effect."""
_SHOWN: Final = ("engine", "parallel.strategy", "precision")
"""Shown also where they are the defaults."""
_REQUIRED: Final = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


@dataclass(frozen=True, slots=True)
class Shrunk:
    """An experiment and what a rehearsal makes of it, for so many ranks."""

    real: Experiment
    experiment: Experiment
    ranks: int

    @property
    def changes(self) -> list[Difference]:
        """The fields with other sizes, each with the real value and the small one."""
        return [it for it in self._differences if it.field not in _OMITTED]

    @property
    def kept(self) -> dict[str, str]:
        """The fields that the experiment sets, and that stay."""
        real = self.real.model_dump(mode="json")
        given = {it.field for it in differences([real, self._default.model_dump(mode="json")])} | {*_SHOWN}
        changed = {"name", *_IDLE, *(it.field for it in self._differences)}
        return {path: value for path, value in flattened(real) if path in given - changed}

    @property
    def omitted(self) -> dict[str, str]:
        """The fields that are not rehearsed, and why."""
        changed = {it.field for it in self._differences}
        idle = {it.field for it in differences([it.model_dump(mode="json") for it in (self.real, self._default)])}
        found = {path: why for path, why in _OMITTED.items() if path in changed or (path in _IDLE and path in idle)}
        if any("nvme" in it.values for it in self._differences):
            found["deepspeed"] = "states that go to NVMe stay in memory: the folder is one of the nodes"
        return found

    @property
    def _differences(self) -> list[Difference]:
        return differences([it.model_dump(mode="json") for it in (self.real, self.experiment)], ["name"])

    @property
    def _default(self) -> Experiment:
        """The experiment with what its file must say, and defaults."""
        real = self.real
        least = {
            "name": real.name,
            "model": {name: getattr(real.model, name) for name in _REQUIRED},
            "batch": {"micro_batch_size": real.batch.micro_batch_size},
            "data": {"data_path": "-"},
            "train": {"train_iters": real.train.train_iters},
        }
        return Experiment.model_validate(least)


def rehearsal_name(name: str) -> str:
    """Returns the name of an experiment's rehearsal, by which runs and trackers show it."""
    return f"{name[:31]}-rehearsal"


def assumed_slots(experiment: Experiment) -> dict[str, range]:
    """Returns slots for an experiment without a cluster, on nodes of 8: of one replica, of two if it is one rank, or of
    as many as are legal."""
    size = size_of_replica(experiment)
    replicas = (1 if size > 1 else 2, *(2, 4, 8, 16, 32, 64))
    ranks = size * next((n for n in replicas if not layout_problems(experiment, n * size)), 1)
    return {f"node-{number}": range(min(8, ranks - 8 * number)) for number in range(-(-ranks // 8))}


def shrink(experiment: Experiment, replicas: int, cores: int) -> Shrunk:
    """Returns it with small sizes, on as many ranks as ``cores``; on more only where no legal layout has fewer.

    Every size of the layout that is above one stays above one. ``replicas``: the real data parallel size. Raises
    :class:`RequestError` if no small size is legal.
    """
    problems: list[Problem] = []
    layouts = sorted(_layouts(experiment.parallel, replicas), key=lambda it: (it[2] > cores, abs(it[2] - cores)))
    for parallel, data, ranks in layouts:
        small = _resized(experiment, replicas, parallel, data)
        if not (found := layout_problems(small, ranks)):
            return Shrunk(experiment, small, ranks)
        problems = problems or found
    raise RequestError(problems)


def _layouts(parallel: Parallel, replicas: int) -> Iterator[tuple[Parallel, int, int]]:
    """Yields the layouts with as many dimensions above one, each with its data parallel size and its ranks."""
    names = (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_shard_size"),
    )
    given = {name: getattr(parallel, name) for name in names}
    small = {
        "virtual_pipeline_model_parallel_size": min(parallel.virtual_pipeline_model_parallel_size, 2),
        "tp_comm_overlap": None if parallel.tp_comm_overlap else parallel.tp_comm_overlap,
    }
    of_model = product(*([None] if size is None else _sizes(size) for size in given.values()))
    for data, sizes in product(_sizes(replicas), of_model):
        chosen = dict(zip(names, sizes, strict=True))
        shards, real = chosen["data_parallel_shard_size"], parallel.data_parallel_shard_size
        if shards is None or real is None or (data > shards) == (replicas > real):
            ranks = data * math.prod(size or 1 for size in sizes[:3])
            yield parallel.model_copy(update={**small, **chosen}), data, ranks


def _sizes(real: int) -> list[int]:
    return [1] if real == 1 else [size for size in {2, *divisors(real)} if 1 < size <= _MOST]


def _resized(experiment: Experiment, replicas: int, parallel: Parallel, data: int) -> Experiment:
    stages = _stages(experiment, parallel)
    sections: dict[str, dict[str, Any]] = {
        "model": {} if experiment.model.is_vision else _model(experiment, parallel, stages),
        "batch": _batch(experiment, replicas, parallel, data),
        "optimizer": _schedule(experiment),
        "train": _train(experiment),
        "launch": {"master_port": None},
        "restart": {"max": max(1, experiment.restart.max)},
    }
    fields = {f"{section}.{name}": value for section, names in sections.items() for name, value in names.items()}
    whole = {"name": rehearsal_name(experiment.name), "parallel": parallel.model_copy(update=stages.fields)}
    return experiment.with_fields({**fields, **whole, "deepspeed": _deepspeed(experiment)})


@dataclass(frozen=True, slots=True)
class _Stages:
    """Layers of all stages, of a model chunk, and of what all chunks are multiples of."""

    layers: int
    chunk: int
    common: int
    fields: Mapping[str, int | None]


def _stages(experiment: Experiment, parallel: Parallel) -> _Stages:
    real, virtual = experiment.parallel, parallel.virtual_pipeline_model_parallel_size
    stages, chunks = parallel.pipeline_model_parallel_size, real.pipeline_model_parallel_size
    chunk = min(2, max(1, experiment.model.num_layers // (chunks * real.virtual_pipeline_model_parallel_size)))
    own: dict[str, int | None] = {}
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        # Of two interleaved stages megatron-core takes only one number.
        takes = stages > 1 and not (own.get("decoder_first_pipeline_num_layers") and stages == 2)
        own[name] = virtual if getattr(real, name) is not None and takes else None
    given = [number for number in own.values() if number is not None]
    layers = sum(given) + (stages - len(given)) * chunk * virtual
    return _Stages(layers, chunk, 1 if given else chunk, own)


def _model(experiment: Experiment, parallel: Parallel, stages: _Stages) -> dict[str, Any]:
    model, real, tensor = experiment.model, experiment.parallel, parallel.tensor_model_parallel_size
    if model.query_groups < model.num_attention_heads:
        groups = 1 if model.query_groups < max(2, real.tensor_model_parallel_size) else max(2, tensor)
        heads = 2 * math.lcm(groups, tensor)
    else:
        of_rank = model.num_attention_heads // real.tensor_model_parallel_size
        groups = heads = tensor * max(1, min(_HEADS // tensor, of_rank))
    sizes = [size for size in _HEAD_SIZES if size < model.head_size] + [model.head_size]
    rotated = [size for size in sizes if (half := int(size * model.rotary_percent)) and half % 2 == 0]
    head = (rotated if model.position_embedding_type == "rope" and rotated else sizes)[0]
    width = heads * head
    if model.attention_size != model.hidden_size:
        width = width // 2 if model.attention_size > model.hidden_size else width * 2
    multiple = 8 * math.lcm(tensor, parallel.expert_tensor_size)

    def scaled(size: int | None) -> int | None:
        return size and multiple * max(1, round(size * width / model.hidden_size / multiple))

    pieces = 2 * parallel.context_parallel_size * tensor
    length = min(model.seq_length, -(-_TOKENS // pieces) * pieces)
    positions, experts = model.max_position_embeddings, parallel.expert_model_parallel_size
    fewest = min(model.experts, model.moe_router_topk + 1)
    return {
        "preset": None,
        "num_layers": stages.layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "kv_channels": model.kv_channels and head,
        "num_query_groups": model.num_query_groups and groups,
        "ffn_hidden_size": scaled(model.ffn_hidden_size),
        "num_moe_experts": model.num_moe_experts and -(-fewest // experts) * experts,
        "moe_ffn_hidden_size": scaled(model.moe_ffn_hidden_size),
        "moe_shared_expert_intermediate_size": scaled(model.moe_shared_expert_intermediate_size),
        "seq_length": length,
        "max_position_embeddings": positions and max(length, positions * length // model.seq_length),
        "checkpoint_num_layers": min(model.checkpoint_num_layers, stages.chunk),
        "recompute_num_layers": model.recompute_num_layers and min(model.recompute_num_layers, stages.common),
        "transformer_impl": "local" if model.transformer_impl else None,
        "fp8": None,
    }


def _batch(experiment: Experiment, replicas: int, parallel: Parallel, data: int) -> dict[str, Any]:
    batch, stages = experiment.batch, parallel.pipeline_model_parallel_size
    micro, steps = min(batch.micro_batch_size, 2), batch.accumulation_steps(replicas)
    steps = steps if steps < stages else min(steps, 2 * stages) // stages * stages
    return {"micro_batch_size": micro, "global_batch_size": batch.global_batch_size and micro * data * max(1, steps)}


def _schedule(experiment: Experiment) -> dict[str, Any]:
    optimizer, iterations = experiment.optimizer, experiment.train.train_iters
    warmup, decay = min(optimizer.lr_warmup_iters, INTERVAL // 2), optimizer.lr_decay_iters
    least = 2 * warmup + 1
    return {"lr_warmup_iters": warmup, "lr_decay_iters": decay and max(least, round(decay * ITERATIONS / iterations))}


def _train(experiment: Experiment) -> dict[str, Any]:
    train = experiment.train
    return {
        "train_iters": ITERATIONS,
        "log_interval": 1,
        "eval_interval": 2 * INTERVAL if train.eval_interval else 0,
        "eval_iters": 1,
        "sample_tokens": min(train.sample_tokens, 8) if train.sample_prompts else train.sample_tokens,
        "save": True,
        "save_interval": INTERVAL,
        "checkpoint_folder": None,
        "load": None,
        "profile_iters": min(train.profile_iters, 2),
    }


def _deepspeed(experiment: Experiment) -> dict[str, Any]:
    """Returns the options that reach DeepSpeed and are no fields of the experiment; NVMe becomes memory."""
    found: dict[str, Any] = {}
    for path, value in options(experiment.deepspeed):
        section, _, name = path.rpartition(".")
        if path in PASSED:
            nvme = isinstance(value, Mapping) and value.get("device") == "nvme"
            (found.setdefault(section, {}) if section else found)[name] = {"device": "cpu"} if nvme else value
    return found
