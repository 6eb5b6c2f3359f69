"""A user's own DeepSpeed JSON: the options that DeepSpeed receives, and the problems of the others. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tridock.engines.fields import as_yaml
from tridock.engines.offload import OFFLOAD, offload_problems
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.deepspeed_json import AUTO, FIELDS, FORMATS, options
from tridock.layout.split import either

_NUMBER: Final = (int, float)
_ZERO: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(
        (
            *("allgather_partitions", "reduce_scatter", "overlap_comm", "contiguous_gradients"),
            *("round_robin_gradients", "ignore_unused_parameters", "use_multi_rank_bucket_allreduce"),
            "stage3_gather_16bit_weights_on_model_save",
        ),
        bool,
    ),
    **dict.fromkeys(
        (
            *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        ),
        _NUMBER,
    ),
}
PASSED: Final[Mapping[str, type | tuple[type, ...]]] = {
    "steps_per_print": _NUMBER,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "zero_allow_untested_optimizer": bool,
    "prescale_gradients": bool,
    "gradient_predivide_factor": _NUMBER,
    "communication_data_type": str,
    "aio": dict,
    "flops_profiler": dict,
    "comms_logger": dict,
    **{f"zero_optimization.{name}": kind for name, kind in _ZERO.items()},
    **dict.fromkeys(OFFLOAD, dict),
}
"""Options of a user's own JSON that DeepSpeed receives unchanged, with their types."""
_NAMES: Final = {bool: "true or false", str: "text", dict: "a mapping"}
_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "scheduler": (
        "the training loop has the learning rate, not DeepSpeed",
        "leave it out, and set optimizer.lr_warmup_iters and lr_decay_style",
    ),
    "zero_optimization.cpu_offload": ("is an option of older versions", "write offload_optimizer: {device: cpu}"),
}


def json_problems(experiment: Experiment, replicas: int) -> Iterator[Problem]:
    """Yields problems of the experiment's own DeepSpeed JSON: options that contradict it, or do not reach DeepSpeed.

    ``replicas``: 0 if the model's ranks do not divide the world size.
    """
    if experiment.parallel.strategy != "zero":
        return  # the engine refuses the whole JSON
    for path, value in options(experiment.deepspeed):
        if value == AUTO and (path in FIELDS or path in _CHECKED):
            continue
        if path in FIELDS:
            section, _, name = FIELDS[path].partition(".")
            ours = getattr(getattr(experiment, section), name)
            ours = ours if ours is not None or not replicas else experiment.batch.samples_per_step(replicas)
            if value != ours:
                todo = "leave one of the two out"
                yield Problem(f"deepspeed.{path}", f"is {FIELDS[path]}, which is {as_yaml(ours)}", str(value), todo)
        elif path in _CHECKED:
            yield from _CHECKED[path](experiment, replicas, path, value)
        elif path not in PASSED:
            what, todo = _REFUSED.get(path, ("does not reach DeepSpeed", "leave it out"))
            yield Problem(f"deepspeed.{path}", what, str(value), todo)
        elif not isinstance(value, PASSED[path]) or (PASSED[path] is not bool and isinstance(value, bool)):
            kind = PASSED[path]
            what = f"must be {_NAMES[kind] if isinstance(kind, type) else 'a number'}"
            yield Problem(f"deepspeed.{path}", what, repr(value), "write one")


def _format_problems(experiment: Experiment, _replicas: int, path: str, value: object) -> Iterator[Problem]:
    if value is not (experiment.precision == FORMATS[path]):
        what = f"sets the precision, which is {experiment.precision}"
        yield Problem(f"deepspeed.{path}", what, as_yaml(value), "leave one of the two out")


def _accumulation_problems(experiment: Experiment, replicas: int, path: str, value: object) -> Iterator[Problem]:
    if not replicas:
        return
    batch = experiment.batch
    steps = batch.samples_per_step(replicas) / (batch.micro_batch_size * replicas)
    if value != steps:
        what = f"batch.global_batch_size {batch.samples_per_step(replicas)} takes {steps:g} on {replicas} replicas"
        wanted = f"set it to {batch.micro_batch_size * replicas * value}, or " if isinstance(value, int) else ""
        yield Problem(f"deepspeed.{path}", what, str(value), f"{wanted}leave this out")


def _offload_problems(experiment: Experiment, _replicas: int, path: str, value: object) -> Iterator[Problem]:
    yield from offload_problems(experiment, path, value)


def _constant_problems(_experiment: Experiment, _replicas: int, path: str, value: object) -> Iterator[Problem]:
    if value not in _CONSTANTS[path]:
        needed = either([str(choice) for choice in _CONSTANTS[path]])
        yield Problem(f"deepspeed.{path}", f"is {needed} in every engine", str(value), "leave it out")


_CONSTANTS: Final = {"optimizer.type": ("AdamW", "Adam"), "fp16.min_loss_scale": (1,)}
_CHECKED: Final[Mapping[str, Callable[[Experiment, int, str, object], Iterator[Problem]]]] = {
    **dict.fromkeys(FORMATS, _format_problems),
    **dict.fromkeys(_CONSTANTS, _constant_problems),
    "gradient_accumulation_steps": _accumulation_problems,
    **dict.fromkeys(OFFLOAD, _offload_problems),
}
