"""All reasons why an experiment cannot run on a number of ranks, each with the nearest legal value."""

from collections.abc import Iterator

from tridock.contracts.devices import VISIBLE
from tridock.engines import as_yaml, engine_of, field_problems
from tridock.engines.deepspeed_options import json_problems
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.model import Model
from tridock.layout.split import either, nearest_divisors, size_of_replica, world_problems


def layout_problems(experiment: Experiment, world_size: int, slots: int | None = None) -> list[Problem]:
    """Returns every problem of the experiment on ``world_size`` ranks, ``slots`` on each node; ``where`` is the field's
    path."""
    engine = engine_of(experiment)
    replicas, rest = divmod(world_size, size_of_replica(experiment))
    return [
        *(_image_problems(experiment) if experiment.model.is_vision else ()),
        *field_problems(experiment),
        *engine.problems(experiment),
        *_model_problems(experiment),
        *world_problems(experiment, world_size, engine.takes_sizes),
        *(() if rest else engine.batch_problems(experiment, replicas)),
        *(() if slots is None else engine.node_problems(experiment, slots)),
        *json_problems(experiment, 0 if rest else replicas),
        *_schedule_problems(experiment),
        *_saving_problems(experiment),
        *_device_problems(experiment),
    ]


def _saving_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a folder for checkpoints although the run saves none."""
    train = experiment.train
    if train.checkpoint_folder is not None and not train.save:
        todo = "set train.save to true, or leave it out"
        yield Problem("train.checkpoint_folder", "nothing is saved", train.checkpoint_folder, todo, ("null",))


def _device_problems(experiment: Experiment) -> Iterator[Problem]:
    """GPUs belong to a node, and an experiment runs on many: the launchers would overwrite the variable."""
    if (devices := experiment.env.get(VISIBLE)) is not None:
        todo = (
            "set it in the shell for tridock train, or in nodes.<name>.env of the cluster's settings for tridock launch"
        )
        yield Problem(f"env.{VISIBLE}", "chooses GPUs of a node, not of an experiment", repr(devices), todo)


def _image_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields the problems of preset resnet50."""
    parallel = experiment.parallel
    if not engine_of(experiment).trains_images:
        what, todo = f"engine {experiment.engine} has no model of images", "use engine torch"
        yield Problem("model.preset", what, "resnet50", todo)
    if parallel.strategy == "zero":
        what, todo = "preset resnet50 goes with ddp and fsdp", "use one of them"
        yield Problem("parallel.strategy", what, "zero", todo, ("ddp", "fsdp"))
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(parallel, field)) != 1:
            yield Problem(f"parallel.{field}", "preset resnet50 is not split", str(size), "set it to 1", (1,))
    if experiment.model.checkpoint_activations:
        what, todo = "preset resnet50 keeps its activations", "leave it out"
        yield Problem("model.checkpoint_activations", what, "true", todo, ("false",))
    if experiment.train.sample_prompts:
        what, todo = "preset resnet50 writes no text", "leave it out"
        yield Problem("train.sample_prompts", what, as_yaml(experiment.train.sample_prompts), todo, ("[]",))
    if experiment.train.compile:
        what, todo = "preset resnet50 is not compiled", "leave it out"
        yield Problem("train.compile", what, "true", todo, ("false",))


def _model_problems(experiment: Experiment) -> Iterator[Problem]:
    model = experiment.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        tensor = experiment.parallel.tensor_model_parallel_size
        near = nearest_divisors(model.hidden_size, model.num_attention_heads, multiple_of=tensor)
        what, got = f"must divide hidden_size {model.hidden_size}", str(model.num_attention_heads)
        todo = f"use {either(near)}, or set model.kv_channels"
        yield Problem("model.num_attention_heads", what, got, todo, near)
    heads, groups = model.num_attention_heads, model.query_groups
    if heads % groups:
        near = nearest_divisors(heads, groups, multiple_of=experiment.parallel.tensor_model_parallel_size)
        what, todo = f"must divide num_attention_heads {heads}", f"use {either(near)}"
        yield Problem("model.num_query_groups", what, str(groups), todo, near)
    length, positions = model.seq_length, model.max_position_embeddings
    if positions is not None and positions < length:
        what, todo = f"must be at least seq_length {length}", f"raise it to {length}, or leave it out"
        yield Problem("model.max_position_embeddings", what, str(positions), todo, (length,))
    yield from _rotary_problems(model)


def _rotary_problems(model: Model) -> Iterator[Problem]:
    """Yields rotary problems: an odd size, which has no halves, or rotary fields without rope."""
    if model.position_embedding_type == "rope":
        if model.rotary_size % 2 or not model.rotary_size:
            what = f"must rotate an even number of the {model.head_size} elements of a head"
            yield Problem("model.rotary_percent", what, str(model.rotary_percent), "use 0.5 or 1, or other heads")
        scaling = () if model.use_rope_scaling else ("rope_scaling_factor",)
        unused = dict.fromkeys(scaling, "needs use_rope_scaling")
    else:
        names = ("rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor")
        unused = dict.fromkeys(names, "needs position_embedding_type rope")
    for name, what in unused.items():
        default, value = type(model).model_fields[name].default, getattr(model, name)
        if value != default:
            yield Problem(f"model.{name}", what, as_yaml(value), "leave it out", (as_yaml(default),))


def _schedule_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields what Megatron's ``OptimizerParamScheduler`` refuses; every engine uses its schedule."""
    optimizer, iterations = experiment.optimizer, experiment.train.train_iters
    decay, warmup = optimizer.lr_decay_iters or iterations, optimizer.lr_warmup_iters
    if warmup and optimizer.lr_warmup_fraction is not None:
        what, todo = "cannot be given beside lr_warmup_iters", "leave one of the two out"
        yield Problem("optimizer.lr_warmup_fraction", what, str(optimizer.lr_warmup_fraction), todo, ("null",))
    if warmup and warmup >= decay:
        what = f"must be less than lr_decay_iters {decay}"
        yield Problem("optimizer.lr_warmup_iters", what, str(warmup), "lower it", (decay // 2,))
    if optimizer.min_lr > optimizer.lr:
        what, got = f"must not exceed lr {optimizer.lr:g}", f"{optimizer.min_lr:g}"
        yield Problem("optimizer.min_lr", what, got, "lower it", (repr(optimizer.lr),))
