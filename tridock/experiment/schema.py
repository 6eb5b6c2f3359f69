"""The typed experiment: frozen, strict, with Megatron's own names; no I/O.

Each field's description and unit stand here once; ``configs/reference.yaml`` is rendered from them.
Checks that need more than one section live in :mod:`tridock.plan`, those of one field or section here.
"""

import posixpath
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from tridock.experiment.deepspeed_json import with_fields_of
from tridock.strict_yaml import AS_TUPLE, EnvName, EnvValue, Section

Engine = Literal["torch", "megatron-deepspeed", "megatron-core"]
Strategy = Literal["ddp", "fsdp", "zero"]
DEFAULT_STRATEGY: Final[Mapping[str, Strategy]] = {
    "torch": "zero",
    "megatron-deepspeed": "zero",
    "megatron-core": "ddp",
}
Precision = Literal["fp32", "bf16", "fp16"]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$")]
Argument = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00']+$")]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    number, unit = value[:-1], value[-1:]
    if unit not in _UNITS or not number.isdecimal():
        raise ValueError("must be a whole number of seconds, or one with its unit as in 90s, 30m, 12h, 7d")
    return int(number) * _UNITS[unit]


Seconds = Annotated[int, Field(gt=0), BeforeValidator(_seconds)]
MasterPort = Annotated[int, Field(ge=1024, le=65535)]

PRESETS: Final[Mapping[str, tuple[int, int, int]]] = {
    "gpt-small": (12, 12, 768),
    "gpt-large": (24, 16, 1536),
    "gpt-xl": (24, 24, 2048),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
"""Layers, heads and hidden size: of PyTorch's data parallel benchmark, and of GPT-2 (Radford et al., 2019, table 2)."""
_HEAD_SIZES: Final[Mapping[str, int]] = {"gpt-xl": 128}
"""kv_channels of presets whose heads do not share out hidden_size (GPT-3 XL: Brown et al., 2020, table 2.1)."""
Preset = Literal["gpt-small", "gpt-large", "gpt-xl", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "resnet50"]

_RESNET: Final[Mapping[str, int | float]] = {
    "num_layers": 16,  # blocks
    "num_attention_heads": 1,
    "hidden_size": 2048,
    "seq_length": 1,  # a sample is one image, and one prediction
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_IMAGES: Final[Mapping[str, int]] = {"img_h": 224, "img_w": 224, "num_classes": 1000}
"""What preset resnet50 has, and nothing else, with ImageNet's sizes."""


class Model(Section):
    """The shape of the GPT, with Megatron's names, or of the image model."""

    preset: Preset | None = Field(
        default=None,
        description="A known shape: gives num_layers, num_attention_heads and hidden_size where they are left out;"
        " gpt-xl, of 24 heads, also kv_channels 128, unless heads or hidden_size are given."
        " resnet50 classifies images, with engine torch: of the model's fields it has img_h, img_w and num_classes.",
    )
    num_layers: Positive = Field(description="Transformer layers.")
    hidden_size: Positive = Field(description="Width of the residual stream.")
    num_attention_heads: Positive = Field(
        description="Attention heads; must divide hidden_size, unless kv_channels is given."
    )
    kv_channels: Positive | None = Field(
        default=None, description="Size of one attention head; hidden_size / num_attention_heads where left out."
    )
    seq_length: Positive = Field(description="Tokens of one training sample.")
    max_position_embeddings: Positive | None = Field(
        default=None, description="Rows of the position table; seq_length where left out."
    )
    vocab_size: Positive | None = Field(
        default=None,
        description="Tokens of the tokenizer; read from the data where left out. Engine megatron-deepspeed trains with"
        " those of data.vocab_file in any case: there it serves the plan only.",
    )
    make_vocab_size_divisible_by: Positive = Field(
        default=128,
        description="The embedding is padded to a multiple of this times the tensor parallel size; with engine torch of"
        " this alone.",
    )
    hidden_dropout: Fraction = Field(default=0.1, description="Dropout on the residual branches and the embedding.")
    attention_dropout: Fraction = Field(default=0.1, description="Dropout on the attention weights.")
    init_method_std: float = Field(default=0.02, gt=0.0, description="Standard deviation of the initial weights.")
    checkpoint_activations: bool = Field(
        default=False, description="Recompute each layer's activations in the backward pass."
    )
    checkpoint_num_layers: Positive = Field(
        default=1, description="Engine megatron-deepspeed: layers between two stored activations."
    )
    partition_activations: bool = Field(
        default=False,
        description="Engine megatron-deepspeed: partition the stored activations over the tensor parallel ranks.",
    )
    checkpoint_in_cpu: bool = Field(
        default=False, description="Engine megatron-deepspeed: keep what is stored in the host's memory."
    )
    contiguous_checkpointing: bool = Field(
        default=False, description="Engine megatron-deepspeed: keep what is stored in one piece of memory."
    )
    synchronize_each_layer: bool = Field(
        default=False, description="Engine megatron-deepspeed: wait for the device around each stored layer."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        default=None,
        description="Engine megatron-core: what the backward pass computes again: full (layers) or selective"
        " (the attention's inside).",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description="Granularity full: uniform (every layer, in groups of recompute_num_layers) or block (the first"
        " recompute_num_layers of a stage).",
    )
    recompute_num_layers: Positive | None = Field(default=None, description="Granularity full: layers of a group.")
    img_h: Positive | None = Field(default=None, description="Preset resnet50: height of its images; 224.")
    img_w: Positive | None = Field(default=None, description="Preset resnet50: width of its images; 224.")
    num_classes: Positive | None = Field(default=None, description="Preset resnet50: kinds of images; 1000.")

    @property
    def is_vision(self) -> bool:
        return self.preset == "resnet50"

    @property
    def attention_size(self) -> int:
        """Width of the queries of all heads; so are keys, values and the attention's output."""
        return self.num_attention_heads * (self.kv_channels or self.hidden_size // self.num_attention_heads)

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return "images" if self.is_vision else "tokens"

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(fields.get("preset"), str) and fields["preset"] in PRESETS:
            sizes: dict[str, int | None] = dict(
                zip(("num_layers", "num_attention_heads", "hidden_size"), PRESETS[fields["preset"]], strict=True)
            )
            if not {"num_attention_heads", "hidden_size"} & fields.keys():
                sizes["kv_channels"] = _HEAD_SIZES.get(fields["preset"])
            return {**sizes, **fields}
        if isinstance(fields, dict) and fields.get("preset") == "resnet50":
            given = {name: value for name, value in fields.items() if name not in _IMAGES or value is not None}
            images = {**_IMAGES, **given}
            return {"vocab_size": images["num_classes"], **_RESNET, **images}
        return fields

    @model_validator(mode="after")
    def _check_preset_fields(self) -> Self:
        if not self.is_vision:
            given = [name for name in _IMAGES if getattr(self, name) is not None]
            what = "only preset resnet50 has"
        else:
            expected = {
                **{name: field.default for name, field in type(self).model_fields.items()},
                **_RESNET,
                **{name: getattr(self, name) for name in ("preset", *_IMAGES)},
                "vocab_size": self.num_classes,
            }
            given = [name for name, value in expected.items() if getattr(self, name) != value]
            what = "preset resnet50 has no"
        if given:
            raise ValueError(f"{what} {', '.join(given)}")
        return self


class Parallel(Section):
    """How the model and its state are laid out over the ranks."""

    strategy: Strategy = Field(
        default="zero",
        description="ddp (the engine's own, without DeepSpeed; the only one of megatron-core, and its default), fsdp"
        " (engine torch: weights, gradients and optimizer states sharded) or zero (DeepSpeed, stages 0 to 3).",
    )
    data_parallel_shard_size: Positive | None = Field(
        default=None,
        description="Strategy fsdp: ranks that share one copy of the states out, with copies of it over the others"
        " (hybrid sharding); all data parallel ranks where left out.",
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = Field(
        default="1f1b",
        description="Engine torch: the order of a pipeline's micro-batches; interleaved goes with"
        " virtual_pipeline_model_parallel_size above 1.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="What DeepSpeed's ZeRO partitions: 1 optimizer states, 2 and gradients, 3 and parameters.",
    )
    tensor_model_parallel_size: Positive = Field(default=1, description="Ranks that share one layer.")
    pipeline_model_parallel_size: Positive = Field(default=1, description="Stages that the layers are cut into.")
    virtual_pipeline_model_parallel_size: Positive = Field(
        default=1,
        description="Engines megatron-core and torch: runs of layers that a stage holds, interleaved with the others'.",
    )
    use_tp_pp_dp_mapping: bool = Field(
        default=False,
        description="Engines megatron-core and torch: number the ranks so that the stages of a pipeline are neighbours,"
        " within a node where they fit, and its replicas lie apart; as Megatron's option of this name.",
    )
    context_parallel_size: Positive = Field(
        default=1, description="Engine megatron-core: ranks that share one sample's tokens."
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Engine megatron-core: partition tokens over the tensor parallel ranks between the split layers.",
    )
    use_distributed_optimizer: bool = Field(
        default=False, description="Engine megatron-core: shard the optimizer's states over the data parallel ranks."
    )


class Batch(Section):
    """Samples per step."""

    micro_batch_size: Positive = Field(description="Samples of one forward pass on one rank.")
    global_batch_size: Positive | None = Field(
        default=None,
        description="Samples of one optimizer step: micro batch x data parallel size x accumulation steps;"
        " one micro batch a rank where left out.",
    )

    def samples_per_step(self, data_parallel_size: int) -> int:
        """``global_batch_size``, or Megatron's default for it: no accumulation."""
        return self.global_batch_size or self.micro_batch_size * data_parallel_size


class Data(Section):
    """What is read: Megatron's indexed data sets; of images, arrays of numpy."""

    data_path: str = Field(
        min_length=1,
        description="Prefix of <prefix>.bin and <prefix>.idx, as seen in the container's /workspace; of images"
        " <prefix>_images.npy (uint8, N x 3 x height x width) and <prefix>_labels.npy (int64, N).",
    )
    split: Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?,\d+(\.\d+)?,\d+(\.\d+)?$")] = Field(
        default="949,50,1", description="Shares of the documents (or images) for training, validation and test."
    )
    vocab_file: str | None = Field(
        default=None,
        min_length=1,
        description="GPT-2 vocabulary (vocab.json): engine megatron-deepspeed needs it, the others do not read it.",
    )
    merge_file: str | None = Field(
        default=None,
        min_length=1,
        description="GPT-2 merges (merges.txt): engine megatron-deepspeed needs it, the others do not read it.",
    )


class Optimizer(Section):
    """AdamW, and its schedule."""

    lr: float = Field(default=1.5e-4, gt=0.0, description="Peak learning rate.")
    min_lr: float = Field(default=1.0e-5, ge=0.0, description="Learning rate at the end of the decay.")
    lr_decay_style: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Shape of the decay.")
    lr_warmup_iters: Count = Field(default=0, description="Iterations of linear warm-up from zero.")
    lr_warmup_fraction: Fraction | None = Field(
        default=None,
        description="Warm-up as a fraction of lr_decay_iters, as Megatron's --lr-warmup-fraction and v1.1.5's --warmup;"
        " instead of lr_warmup_iters.",
    )
    lr_decay_iters: Positive | None = Field(
        default=None, description="Iteration at which min_lr is reached; train_iters where left out."
    )
    weight_decay: float = Field(default=0.01, ge=0.0, description="Decoupled weight decay; not on biases and norms.")
    adam_beta1: Fraction = Field(default=0.9, description="Decay of the first moment.")
    adam_beta2: Fraction = Field(default=0.999, description="Decay of the second moment.")
    adam_eps: float = Field(default=1e-8, gt=0.0, description="Added to the denominator.")
    clip_grad: float = Field(default=1.0, ge=0.0, description="Largest global gradient norm; 0 turns clipping off.")


class LossScale(Section):
    """fp16 only. ``loss_scale: 0`` is dynamic, as in Megatron and DeepSpeed."""

    loss_scale: float = Field(default=0.0, ge=0.0, description="Fixed loss scale; 0 for a dynamic one.")
    initial_scale_power: Count = Field(default=16, description="The dynamic scale starts at 2 to this power.")
    loss_scale_window: Positive = Field(default=1000, description="Good steps before the dynamic scale doubles.")
    hysteresis: Positive = Field(default=2, description="Overflows before the dynamic scale halves.")


class Train(Section):
    """Length of the run and what is reported and kept."""

    train_iters: Positive = Field(description="Optimizer steps.")
    log_interval: Positive = Field(default=10, description="Iterations between log lines.")
    eval_interval: Count = Field(default=0, description="Iterations between evaluations; 0 for none.")
    eval_iters: Positive = Field(default=10, description="Batches of one evaluation.")
    save_interval: Count = Field(default=0, description="Iterations between checkpoints; 0: only at the end.")
    save: bool = Field(default=True, description="Write checkpoints into the run's folder.")
    keep_checkpoints: Positive | None = Field(
        default=None,
        description="How many whole checkpoints to keep, the newest; older ones are removed once a new one is whole."
        " All where left out.",
    )
    async_save: bool = Field(
        default=True,
        description="Write checkpoints in the background: training pauses only for the copy of the state to the host's"
        " memory. The last one is written at once.",
    )
    checkpoint_folder: str | None = Field(
        default=None,
        min_length=1,
        description="Where checkpoints go instead of the run's folder.",
    )
    load: str | None = Field(
        default=None,
        description="Checkpoint folder to continue from (of a run: runs/<run-id>/checkpoints). The same as"
        " checkpoint_folder: the first run, which finds no checkpoint there, begins from scratch.",
    )
    seed: Count = Field(default=1234, description="Seed of the weights, dropout and the order of the data.")
    compile: bool = Field(
        default=False, description="Engine torch: compile the layers (torch.compile) in the first step."
    )
    tf32: bool = Field(
        default=False,
        description="On GPUs that have it, compute fp32 matrix products and convolutions in TensorFloat-32: faster,"
        " with 10 bits of mantissa. Set for every run, whatever the image's environment says.",
    )
    tensorboard: bool = Field(default=True, description="Write TensorBoard files into the run's folder.")
    profile_iters: Count = Field(
        default=0,
        description="Run the last so many iterations under torch's profiler: traces in the run's profile/, and the"
        " share of their time that goes into communication. 0 for none.",
    )

    @property
    def loads_own_folder(self) -> bool:
        """Whether it continues from the folder that it saves in, as Megatron's scripts do with --save and --load."""
        folders = (self.checkpoint_folder, self.load)
        return None not in folders and len({posixpath.normpath(folder or "") for folder in folders}) == 1


class Launch(Section):
    """How the ranks are started."""

    master_port: MasterPort | None = Field(
        default=None, description="Port of the rendezvous on the head; a free one where left out."
    )
    hang_timeout: Count = Field(
        default=30,
        description="Seconds without progress after which a rank counts as hung and the run is ended, though at least"
        " three step times; 0 for never (a debugger holds a rank).",
    )


class Restart(Section):
    """Restarts of a failed run from its last checkpoint."""

    max: Count = Field(default=0, description="Restarts that are allowed; 0 for none.")
    window: Seconds | None = Field(
        default=None,
        description="The time in which so many are allowed: in seconds, or as 90s, 30m, 12h, 7d; the whole run where"
        " left out.",
    )
    node_timeout: Annotated[Seconds, Field(ge=30)] = Field(
        default=60,
        description="How long a lost node may take to come back, from the end of the run on, before a spare takes its"
        " place or the run continues with fewer data parallel replicas.",
    )
    min_nodes: Positive = Field(
        default=1, description="The fewest nodes with which the run may continue; with fewer it ends."
    )


class Experiment(Section):
    """What is trained, how, and for how long."""

    name: Name = Field(description="Short name; begins every run id.")
    engine: Engine = Field(default="torch", description="The training code.")
    model: Model
    parallel: Parallel = Field(default_factory=Parallel)
    batch: Batch
    data: Data
    optimizer: Optimizer = Field(default_factory=Optimizer)
    precision: Precision = Field(default="bf16", description="Number format of the forward and backward pass.")
    fp16: LossScale = Field(default_factory=LossScale)
    train: Train
    launch: Launch = Field(default_factory=Launch)
    restart: Restart = Field(default_factory=Restart)
    megatron_args: Annotated[tuple[Argument, ...], AS_TUPLE] = Field(
        default=(),
        description="Engine megatron-deepspeed: arguments for Megatron's command line that have no field here.",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="Strategy zero: a DeepSpeed JSON of your own. Its options that are fields here set them where they"
        " are left out; ZeRO's bucket sizes and the like reach DeepSpeed (docs/megatron.md).",
    )
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict, description="Environment of every rank; wins over the cluster's."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_deepspeed_json(cls, fields: Any) -> Any:
        return with_fields_of(fields) if isinstance(fields, Mapping) else fields

    @model_validator(mode="before")
    @classmethod
    def _default_strategy(cls, fields: Any) -> Any:
        # The default of one section that depends on another's value.
        engine = fields.get("engine") if isinstance(fields, dict) else None
        if isinstance(engine, str) and engine in DEFAULT_STRATEGY:
            parallel = fields.get("parallel", {})
            if isinstance(parallel, dict):
                return {**fields, "parallel": {"strategy": DEFAULT_STRATEGY[engine], **parallel}}
        return fields

    def resolved(self, data_parallel_size: int) -> Self:
        """The same experiment with what depends on the cluster filled in: what a run's folder keeps."""
        samples = self.batch.samples_per_step(data_parallel_size)
        batch = self.batch.model_copy(update={"global_batch_size": samples})
        # The global batch says it from here on, also where the run continues with fewer replicas.
        deepspeed = {name: value for name, value in self.deepspeed.items() if name != "gradient_accumulation_steps"}
        return self.model_copy(update={"batch": batch, "deepspeed": deepspeed})
