"""The program of engine ``megatron-deepspeed``, and its checkpoints."""

import posixpath
from collections.abc import Iterator
from dataclasses import replace

from tridock.contracts import run_folder
from tridock.contracts.pretrained import DEEPSPEED, MEGATRON
from tridock.engines.fields import CHECKPOINT_OPTIONS
from tridock.engines.megatron_lm.checkpoint_layout import checkpoint_problems
from tridock.engines.megatron_lm.rules import SAME
from tridock.engines.program import Program, RankProgram
from tridock.experiment import Experiment
from tridock.layout import Plan

MODULE = "tridock.train.megatron_lm.pretrain_gpt2"
INDEX_MAPS = "tridock.train.megatron_lm.index_maps"
_SPELLED = {"contiguous_checkpointing": "--contigious-checkpointing"}  # upstream's spelling


def megatron_arguments(experiment: Experiment, plan: Plan, run_path: str) -> tuple[str, ...]:
    """Returns the arguments after ``pretrain_gpt2.py``. Relative paths start two folders above the run's folder."""
    argv: list[str] = []
    for option, value in _options(experiment, plan, run_path):
        argv += [option] if value is None else [option, str(value)]
    return (*argv, *experiment.megatron_args)


def index_map_arguments(experiment: Experiment, plan: Plan, workspace: str) -> tuple[str, ...]:
    """Returns the arguments after ``python -m tridock.train.megatron_lm.index_maps``, which determine a run's samples.

    One process builds the maps, without the model; ``--data-parallel-size`` is the number of replicas of the run.
    """
    alone = replace(plan, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    off = dict.fromkeys(("model.checkpoint_activations", "train.save", "train.tensorboard"), False)
    plain = experiment.with_fields({"parallel.strategy": "ddp", "train.load": None, **off})
    argv = megatron_arguments(plain, alone, f"{workspace}/runs/none")
    return ("--data-parallel-size", str(plan.data_parallel_size), *argv)


def _options(experiment: Experiment, plan: Plan, run_path: str) -> Iterator[tuple[str, object]]:
    workspace = posixpath.dirname(posixpath.dirname(run_path))
    for option, path in SAME.items():
        section, _, field = path.partition(".")
        yield option, getattr(getattr(experiment, section), field)
    yield from _model(experiment)
    yield from _layout(plan)
    yield from _data(experiment, workspace)
    yield from _precision(experiment)
    yield from _length(experiment, run_path, workspace)
    if experiment.parallel.strategy == "zero":
        yield "--deepspeed", None
        yield "--deepspeed_config", f"{run_path}/{run_folder.DEEPSPEED_CONFIG}"
        yield "--zero-stage", experiment.parallel.zero_stage


def _model(experiment: Experiment) -> Iterator[tuple[str, object]]:
    model = experiment.model
    yield "--max-position-embeddings", model.max_position_embeddings or model.seq_length
    if model.checkpoint_activations:
        yield "--checkpoint-activations", None
        yield "--checkpoint-num-layers", model.checkpoint_num_layers
        chosen = [field for field in CHECKPOINT_OPTIONS if getattr(model, field)]
        if chosen:
            # Upstream's scripts give the options below without this one, so that they have no effect.
            yield "--deepspeed-activation-checkpointing", None
        for field in chosen:
            yield _SPELLED.get(field, "--" + field.replace("_", "-")), None


def _layout(plan: Plan) -> Iterator[tuple[str, object]]:
    stages = plan.pipeline_model_parallel_size
    yield "--model-parallel-size", plan.tensor_model_parallel_size
    # 0 means no pipeline to upstream; 1 would build a pipeline of one stage.
    yield "--pipe-parallel-size", stages if stages > 1 else 0
    yield "--batch-size", plan.micro_batch_size
    yield "--gas", plan.accumulation_steps


def _data(experiment: Experiment, workspace: str) -> Iterator[tuple[str, object]]:
    data = experiment.data
    yield "--data-path", posixpath.join(workspace, data.prefix)
    yield "--vocab-file", posixpath.join(workspace, data.vocab_file or "")
    yield "--merge-file", posixpath.join(workspace, data.merge_file or "")
    yield "--data-impl", "mmap"
    if experiment.train.load is not None:
        yield "--load", posixpath.join(workspace, experiment.train.load)
    if experiment.train.override_checkpoint:
        yield "--override-lr-scheduler", None


def _precision(experiment: Experiment) -> Iterator[tuple[str, object]]:
    if experiment.precision == "fp16":
        fp16 = experiment.fp16
        yield "--fp16", None
        if fp16.loss_scale:
            yield "--loss-scale", fp16.loss_scale
        yield "--loss-scale-window", fp16.loss_scale_window
        yield "--hysteresis", fp16.hysteresis


def _length(experiment: Experiment, run_path: str, workspace: str) -> Iterator[tuple[str, object]]:
    train, optimizer = experiment.train, experiment.optimizer
    decay = optimizer.lr_decay_iters or train.train_iters
    yield "--lr-decay-iters", decay
    fraction = optimizer.lr_warmup_fraction
    yield "--warmup", optimizer.lr_warmup_iters / decay if fraction is None else fraction
    # Upstream divides by it, and evaluates at the end in any case.
    yield "--eval-interval", train.eval_interval or train.train_iters + 1
    if train.save:
        yield "--save", posixpath.join(workspace, train.checkpoint_folder or f"{run_path}/{run_folder.CHECKPOINTS}")
        yield "--save-interval", train.save_interval or train.train_iters
    if train.tensorboard:
        yield "--tensorboard-dir", f"{run_path}/{run_folder.TENSORBOARD}"


class MegatronLMProgram(Program):
    """Megatron-LM v1.1.5's ``pretrain_gpt2.py``."""

    checkpoints_load_on = "same layout"
    # With DeepSpeed, its own checkpoints are DeepSpeed's too.
    resumes_formats = frozenset((MEGATRON, DEEPSPEED))
    needs_megatron_source = True
    tokenizer_fields = ("vocab_file", "merge_file")
    whole_samples = False
    prints_timers = True

    def of_rank(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        if load is not None:
            experiment = experiment.with_fields({"train.load": load})
        return RankProgram(MODULE, ("--run-folder", run_path, *megatron_arguments(experiment, plan, run_path)))

    def index_maps(self, experiment: Experiment, plan: Plan, workspace: str) -> tuple[str, ...]:
        return (INDEX_MAPS, *index_map_arguments(experiment, plan, workspace))

    checkpoint_problems = staticmethod(checkpoint_problems)
