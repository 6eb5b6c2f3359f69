"""All reasons why an experiment cannot run on a number of ranks, each with the nearest legal value."""

from collections.abc import Iterator
from typing import Final

from tridock.contracts.devices import VISIBLE
from tridock.engines import field_problems, rules_of
from tridock.engines.deepspeed_options import json_problems
from tridock.engines.fields import as_yaml
from tridock.engines.other_programs import other_program_problems
from tridock.errors import Problem, count
from tridock.experiment import Experiment
from tridock.experiment.model import Model
from tridock.experiment.training import learning_rate
from tridock.gpus import Gpu
from tridock.layout.split import must_divide, size_of_replica, world_problems


def layout_problems(
    experiment: Experiment, world_size: int, slots: int | None = None, gpu: Gpu | None = None
) -> list[Problem]:
    """Returns every problem on ``world_size`` ranks, ``slots`` on each node; ``where`` is the field's path."""
    rules = rules_of(experiment)
    replicas, rest = divmod(world_size, size_of_replica(experiment))
    return [
        *(_image_problems(experiment) if experiment.model.is_vision else ()),
        *field_problems(experiment),
        *other_program_problems(experiment),
        *rules.problems(experiment),
        *_model_problems(experiment),
        *world_problems(experiment, world_size, rules.takes_sizes),
        *(() if rest else rules.batch_problems(experiment, replicas)),
        *(() if slots is None else rules.node_problems(experiment, slots)),
        *json_problems(experiment, 0 if rest else replicas),
        *_schedule_problems(experiment),
        *_saving_problems(experiment),
        *_evaluation_problems(experiment),
        *_device_problems(experiment),
        *(() if gpu is None else gpu_problems(experiment, gpu)),
    ]


def gpu_problems(experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
    """Yields the requested features that the GPU does not support."""
    yield from rules_of(experiment).gpu_problems(experiment, gpu)
    if not gpu.bf16 and experiment.precision == "bf16":
        what = f"a {gpu.name} has no bf16: its compute capability is below 8.0"
        yield Problem("precision", what, "bf16", "use fp16 or fp32", ("fp16", "fp32"))


def _saving_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a folder for checkpoints although the run saves none."""
    train = experiment.train
    if train.checkpoint_folder is not None and not train.save:
        todo = "set train.save to true, or leave it out"
        yield Problem("train.checkpoint_folder", "nothing is saved", train.checkpoint_folder, todo, ("null",))


def _evaluation_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a share of 0 for the validation that the run asks for."""
    interval, data = experiment.train.eval_interval, experiment.data
    split = data.split
    if interval and not data.is_divided and not data.sets(1):
        todo = "name some, or set train.eval_interval to 0"
        yield Problem("data.valid_data_path", f"there is no data for validation every {interval} iterations", "", todo)
    elif interval and data.is_divided and not float(split.split(",")[1]):
        todo = "give validation a share, or set train.eval_interval to 0"
        yield Problem("data.split", f"leaves no data for validation every {interval} iterations", split, todo)


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
    if not rules_of(experiment).trains_images:
        what, todo = f"engine {experiment.engine} has no model of images", "use engine torch"
        yield Problem("model.preset", what, "resnet50", todo)
    if not isinstance(experiment.data.data_path, str):
        got = ", ".join(experiment.data.prefixes)
        yield Problem("data.data_path", "preset resnet50 reads one data set", got, "name one data set")
    if parallel.strategy == "zero":
        what, todo = "preset resnet50 goes with ddp and fsdp", "use one of them"
        yield Problem("parallel.strategy", what, "zero", todo, ("ddp", "fsdp"))
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(parallel, field)) != 1:
            yield Problem(f"parallel.{field}", "preset resnet50 is not split", str(size), "set it to 1", (1,))
    for where, value, what in (
        ("model.checkpoint_activations", experiment.model.checkpoint_activations, "keeps its activations"),
        ("train.sample_prompts", experiment.train.sample_prompts, "writes no text"),
        ("train.compile", experiment.train.compile, "is not compiled"),
    ):
        if value:
            nearest = as_yaml(type(value)())
            yield Problem(where, f"preset resnet50 {what}", as_yaml(value), "leave it out", (nearest,))


def _model_problems(experiment: Experiment) -> Iterator[Problem]:
    model = experiment.model
    width, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    tensor = experiment.parallel.tensor_model_parallel_size
    if model.kv_channels is None and width % heads:
        where, more = "model.num_attention_heads", ", or set model.kv_channels"
        yield must_divide(where, heads, width, f"hidden_size {width}", more, tensor)
    if heads % groups:
        named = f"num_attention_heads {heads}"
        yield must_divide("model.num_query_groups", groups, heads, named, multiple_of=tensor)
    length, positions = model.seq_length, model.max_position_embeddings
    if positions is not None and positions < length:
        what, todo = f"must be at least seq_length {length}", f"raise it to {length}, or leave it out"
        yield Problem("model.max_position_embeddings", what, str(positions), todo, (length,))
    if model.qk_layernorm_all_heads and not model.qk_layernorm:
        yield Problem(
            "model.qk_layernorm_all_heads", "needs qk_layernorm", "true", "set it, or leave this out", ("false",)
        )
    yield from _rotary_problems(model)


_OF_SCALING: Final = ("rope_scaling_type", "rope_scaling_factor", "original_max_position_embeddings")


def _rotary_problems(model: Model) -> Iterator[Problem]:
    """Yields rotary problems: an odd size, which has no halves, or rotary fields without rope."""
    if model.position_embedding_type == "rope":
        if model.rotary_size % 2 or not model.rotary_size:
            what = f"must rotate an even number of the {model.head_size} elements of a head"
            yield Problem("model.rotary_percent", what, str(model.rotary_percent), "use 0.5 or 1, or other heads")
        if model.rotary_factor != 1 and model.rotary_percent < 1:
            what = "rope_scaling_type yarn scales whole heads"
            yield Problem("model.rotary_percent", what, str(model.rotary_percent), "leave it out", ("1.0",))
        unused = {} if model.use_rope_scaling else dict.fromkeys(_OF_SCALING, "needs use_rope_scaling")
        if model.use_rope_scaling and model.rope_scaling_type == "linear":
            unused = {"original_max_position_embeddings": "rope_scaling_type linear scales all periods"}
    else:
        names = ("rotary_base", "rotary_percent", "no_rope_freq", "use_rope_scaling", *_OF_SCALING)
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
    # A single step is the last one of its schedule: it tries a run, and trains nothing.
    if iterations > 1 and not any(learning_rate(number, optimizer, iterations) for number in range(1, iterations + 1)):
        what, todo = f"makes the learning rate of all {count(iterations, 'step')} 0", "raise it, or lr_decay_iters"
        yield Problem("optimizer.min_lr", what, f"{optimizer.min_lr:g}", todo, (repr(optimizer.lr / 10),))
