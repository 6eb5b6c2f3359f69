"""How Megatron-LM v1.1.5 treats each field of an experiment, what it cannot run, and the layouts to search."""

from collections.abc import Iterator
from typing import Final

from tridock.contracts.pretrained import MEGATRON
from tridock.engines.deepspeed import zero_stage_problems
from tridock.engines.fields import CHECKPOINT_OPTIONS, COMMON, CORE_ONLY, MIXTURE, Fields, Refused, Unused
from tridock.engines.offload import Offload
from tridock.engines.rules import Choice, Rules
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.data_sets import PART_PATHS
from tridock.experiment.families import MULTIPLIERS
from tridock.layout.split import empty_stage_problems, head_problems, must_divide

FIELDS: Final[Fields] = {
    **COMMON,
    **dict.fromkeys(MIXTURE, Refused("Megatron-LM v1.1.5 has GPT-2's layers: no mixture of experts")),
    "model.vocab_size": Unused("Megatron-LM v1.1.5 counts the tokens of data.vocab_file; the plan counts with this"),
    "model.kv_channels": Refused(
        "Megatron-LM v1.1.5 divides hidden_size among the heads",
        "leave it out (with preset gpt-xl: set model.num_attention_heads to 16), or use engine {others}",
    ),
    **{
        f"model.{name}": Refused(f"Megatron-LM v1.1.5 has GPT-2's layers: {what}")
        for name, what in {
            "num_query_groups": "each head has its own keys and values",
            "ffn_hidden_size": "the MLP is 4 x hidden_size wide",
            "position_embedding_type": "positions are a table",
            "rotary_base": "no rope",
            "rotary_percent": "no rope",
            "use_rope_scaling": "no rope",
            "rope_scaling_type": "no rope",
            "rope_scaling_factor": "no rope",
            "original_max_position_embeddings": "no rope",
            "no_rope_freq": "no rope",
            "normalization": "norms are LayerNorm",
            "qk_layernorm": "no norms of queries and keys",
            "qk_layernorm_all_heads": "no norms of queries and keys",
            "use_post_norm": "norms are before attention and MLP",
            **dict.fromkeys(MULTIPLIERS, "no multipliers"),
            "swiglu": "the MLP has GELU",
            "activation_func": "megatron_args choose GELU (--bias-gelu-fusion: gelu_tanh)",
            "add_bias_linear": "linear layers have biases",
            "add_qkv_bias": "linear layers have biases",
            "add_attention_bias": "linear layers have biases",
            "untie_embeddings_and_output_weights": "the output layer is the token embedding",
        }.items()
    },
    **dict.fromkeys(
        (
            *("parallel.data_parallel_shard_size", "parallel.reduce_gradients_once", "parallel.pipeline_schedule"),
            *("parallel.virtual_pipeline_model_parallel_size", "parallel.use_tp_pp_dp_mapping", *CORE_ONLY),
            *("train.sample_prompts", "train.sample_tokens", "train.compile"),
            *(f"data.{name}" for name in PART_PATHS),
        ),
        Refused(),
    ),
}

SAME: Final = {
    "--num-layers": "model.num_layers",
    "--hidden-size": "model.hidden_size",
    "--num-attention-heads": "model.num_attention_heads",
    "--seq-length": "model.seq_length",
    "--make-vocab-size-divisible-by": "model.make_vocab_size_divisible_by",
    "--hidden-dropout": "model.hidden_dropout",
    "--attention-dropout": "model.attention_dropout",
    "--init-method-std": "model.init_method_std",
    "--layernorm-epsilon": "model.norm_epsilon",
    "--split": "data.split",
    "--lr": "optimizer.lr",
    "--min-lr": "optimizer.min_lr",
    "--lr-decay-style": "optimizer.lr_decay_style",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.adam_beta1",
    "--adam-beta2": "optimizer.adam_beta2",
    "--adam-eps": "optimizer.adam_eps",
    "--clip-grad": "optimizer.clip_grad",
    "--train-iters": "train.train_iters",
    "--log-interval": "train.log_interval",
    "--eval-iters": "train.eval_iters",
    "--seed": "train.seed",
}
"""Megatron's options that have the value of a field."""
OWNED: Final = {
    **SAME,
    "--max-position-embeddings": "model.max_position_embeddings",
    "--checkpoint-activations": "model.checkpoint_activations",
    "--checkpoint-num-layers": "model.checkpoint_num_layers",
    "--deepspeed-activation-checkpointing": "model.partition_activations",
    "--partition-activations": "model.partition_activations",
    "--checkpoint-in-cpu": "model.checkpoint_in_cpu",
    "--contigious-checkpointing": "model.contiguous_checkpointing",
    "--synchronize-each-layer": "model.synchronize_each_layer",
    "--model-parallel-size": "parallel.tensor_model_parallel_size",
    "--pipe-parallel-size": "parallel.pipeline_model_parallel_size",
    "--zero-stage": "parallel.zero_stage",
    "--deepspeed": "parallel.strategy",
    "--deepspeed_config": "deepspeed",
    "--batch-size": "batch.micro_batch_size",
    "--gas": "batch.global_batch_size",
    "--data-path": "data.data_path",
    "--vocab-file": "data.vocab_file",
    "--merge-file": "data.merge_file",
    "--data-impl": "data.data_path",
    "--tokenizer-type": "data.vocab_file",
    "--lr-decay-iters": "optimizer.lr_decay_iters",
    "--warmup": "optimizer.lr_warmup_fraction",
    "--fp16": "precision",
    "--loss-scale": "fp16.loss_scale",
    "--loss-scale-window": "fp16.loss_scale_window",
    "--hysteresis": "fp16.hysteresis",
    "--eval-interval": "train.eval_interval",
    "--save": "train.checkpoint_folder",
    "--save-interval": "train.save_interval",
    "--load": "train.load",
    "--tensorboard-dir": "train.tensorboard",
}
"""Megatron's options that the experiment gives, with the field that gives each."""

FUSED_KERNELS: Final = ("--scaled-upper-triang-masked-softmax-fusion", "--scaled-masked-softmax-fusion")
"""Options of kernels that include a removed header, and name a GPU generation that CUDA 13 has dropped."""


class MegatronLMRules(Rules):
    """The rules of Megatron-LM v1.1.5 on DeepSpeed, or with its own data parallelism."""

    fields = FIELDS

    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        yield from _layout_problems(experiment)
        yield from _checkpointing_problems(experiment)
        if experiment.precision == "bf16":
            what, todo = "Megatron v1.1.5 supports fp16 and fp32", "use fp16 on GPUs, or fp32"
            yield Problem("precision", what, "'bf16'", todo, ("fp16", "fp32"))
        for field in ("vocab_file", "merge_file"):
            if getattr(experiment.data, field) is None:
                todo = "name the file that the data was tokenized with (the demo's are in data/demo/tokenizer)"
                yield Problem(f"data.{field}", "Megatron v1.1.5 reads GPT-2's tokenizer", "nothing", todo)
        if isinstance(experiment.data.data_path, tuple):
            got, todo = ", ".join(experiment.data.prefixes), "join them with tridock data merge, or use another engine"
            yield Problem("data.data_path", "Megatron v1.1.5 reads one data set", got, todo)
        if experiment.train.seed == 0:
            yield Problem("train.seed", "Megatron v1.1.5 needs a positive seed", "0", "use 1 or more", (1,))
        if experiment.train.pretrained_folder is not None:
            what, todo = "Megatron v1.1.5 loads its own checkpoints only", "use engine torch or megatron-core"
            if experiment.train.pretrained is not None and experiment.train.pretrained[0] == MEGATRON:
                what = "is how engines torch and megatron-core start from v1.1.5's weights; it resumes from a folder"
                todo = f"set it to {experiment.train.pretrained_folder}, or use another engine"
            yield Problem("train.load", what, str(experiment.train.load), todo)
        yield from _warmup_problems(experiment)
        yield from zero_stage_problems(experiment)
        if Offload.of(experiment).optimizer or Offload.of(experiment).parameters:
            what = "Megatron v1.1.5's Adam on the host ignores adam_beta1, adam_beta2 and adam_eps"
            yield Problem("deepspeed.zero_optimization", what, "an offload", "leave it out, or use engine torch")
        for word in experiment.megatron_args:
            option = word.partition("=")[0]
            if option in OWNED:
                yield Problem("megatron_args", "the experiment has a field for this", option, f"set {OWNED[option]}")
            if option in FUSED_KERNELS:
                what = "Megatron v1.1.5's fused softmax kernels do not compile since torch 1.11"
                yield Problem("megatron_args", what, option, "leave it out")

    def takes_sizes(self, experiment: Experiment) -> bool:
        parallel = experiment.parallel
        if parallel.context_parallel_size > 1 or any(split_problems(experiment)):
            return False
        stages = parallel.pipeline_model_parallel_size
        return stages == 1 or (parallel.strategy == "zero" and parallel.zero_stage < 2)

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        if experiment.parallel.strategy != "ddp":
            yield from super().batch_problems(experiment, replicas)
            return
        samples, per_pass = experiment.batch.samples_per_step(replicas), experiment.batch.micro_batch_size * replicas
        if samples != per_pass:
            what = "Megatron v1.1.5 without DeepSpeed does not accumulate gradients"
            todo = f"use {per_pass}, or strategy zero"
            yield Problem("batch.global_batch_size", what, str(samples), todo, (per_pass,))

    def recompute_choices(self) -> tuple[Choice, ...]:
        # The options for stored activations depend on recomputation.
        off: Choice = {f"model.{name}": False for name in ("checkpoint_activations", *CHECKPOINT_OPTIONS)}
        return ({**off, "model.checkpoint_num_layers": 1}, {"model.checkpoint_activations": True})


def _warmup_problems(experiment: Experiment) -> Iterator[Problem]:
    """Its rate increases for as many steps as are left after the warm-up, and no longer."""
    warmup, fraction = experiment.optimizer.lr_warmup_iters, experiment.optimizer.lr_warmup_fraction
    decay = experiment.optimizer.lr_decay_iters or experiment.train.train_iters
    if fraction is not None:
        if int(fraction * decay) > decay - fraction * decay:
            what = f"Megatron v1.1.5 reaches lr only in a warm-up of at most half of lr_decay_iters {decay}"
            yield Problem("optimizer.lr_warmup_fraction", what, str(fraction), "use 0.5 or less", ("0.5",))
    elif decay > warmup > decay // 2:
        what = f"Megatron v1.1.5 reaches lr only in a warm-up of at most half of lr_decay_iters {decay}"
        yield Problem("optimizer.lr_warmup_iters", what, str(warmup), f"use {decay // 2} or less", (decay // 2,))


def split_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields heads and layers that the ranks cannot split."""
    yield from head_problems(experiment)
    if experiment.parallel.strategy == "zero":
        yield from empty_stage_problems(experiment)


def _layout_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel = experiment.parallel
    if parallel.strategy == "fsdp":
        what, todo = "engine megatron-deepspeed has no such option", "use zero or ddp, or engine torch"
        yield Problem("parallel.strategy", what, "fsdp", todo, ("zero", "ddp"))
    yield from split_problems(experiment)
    stages, zero = parallel.pipeline_model_parallel_size, parallel.zero_stage
    if stages > 1 and zero > 1 and parallel.strategy == "zero":
        todo = "use 1, or set pipeline_model_parallel_size to 1"
        what = "DeepSpeed's pipeline works with ZeRO 0 and 1 only"
        yield Problem("parallel.zero_stage", what, str(zero), todo, (1,))
    if stages > 1 and parallel.strategy == "ddp":
        what, todo = "Megatron v1.1.5 without DeepSpeed has no pipeline", "set it to 1, or strategy to zero"
        yield Problem("parallel.pipeline_model_parallel_size", what, str(stages), todo, (1,))
    if zero == 0 and parallel.strategy == "zero" and experiment.precision == "fp16":
        # It unscales the gradients nevertheless (0.19.8), and lacks the attribute from which Megatron reads the scale.
        what = "DeepSpeed does not scale Megatron v1.1.5's fp16 loss at stage 0"
        yield Problem("parallel.zero_stage", what, "0", "use 1, which has the same losses, or strategy ddp", (1,))


def _checkpointing_problems(experiment: Experiment) -> Iterator[Problem]:
    model = experiment.model
    if model.checkpoint_activations:
        yield from _interval_problems(experiment)
    elif model.checkpoint_num_layers != 1:
        yield Problem("model.checkpoint_num_layers", _NONE_STORED, str(model.checkpoint_num_layers), _STORE, (1,))
    for field in (field for field in CHECKPOINT_OPTIONS if getattr(model, field)):
        if not model.checkpoint_activations:
            yield Problem(f"model.{field}", _NONE_STORED, "true", _STORE, ("false",))
        elif experiment.parallel.strategy == "ddp":
            todo = "set it to false, or strategy to zero"
            yield Problem(
                f"model.{field}", "needs DeepSpeed, which strategy ddp does not use", "true", todo, ("false",)
            )
    if model.contiguous_checkpointing and not model.partition_activations:
        todo = "set model.partition_activations to true, or leave it out"
        yield Problem("model.contiguous_checkpointing", "needs partition_activations", "true", todo, ("false",))


_NONE_STORED: Final = "is about stored activations, and none are stored"
_STORE: Final = "set model.checkpoint_activations to true, or leave it out"


def _interval_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields groups of layers that do not divide the model. DeepSpeed's pipeline has no such limit."""
    layers, number = experiment.model.num_layers, experiment.model.checkpoint_num_layers
    if experiment.parallel.pipeline_model_parallel_size == 1 and layers % number:
        named = f"num_layers {layers}: Megatron v1.1.5 would run the first ones again"
        yield must_divide("model.checkpoint_num_layers", number, layers, named)
