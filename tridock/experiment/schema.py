"""The schema of an experiment: frozen, strict, with Megatron's field names; no I/O.

``configs/reference.yaml`` is generated from the descriptions and units here. Checks of one field or one section are
here; checks across sections are in :mod:`tridock.plan`.
"""

import posixpath
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from tridock.contracts.limits import MOST_RANKS
from tridock.contracts.pretrained import FORMATS
from tridock.experiment.data_sets import Data
from tridock.experiment.deepspeed_json import with_fields_of
from tridock.experiment.model import Fraction, Layers, Many, Model
from tridock.experiment.rank_env import ENV, RankEnv
from tridock.strict_yaml import AS_TUPLE, Count, PathText, Positive, Section, as_json, whole
from tridock.tracker_settings import Notifications, Trackers

Engine = Literal["torch", "megatron-deepspeed", "megatron-core"]
Strategy = Literal["ddp", "fsdp", "zero"]
DEFAULT_STRATEGY: Final[Mapping[str, Strategy]] = {
    "torch": "zero",
    "megatron-deepspeed": "zero",
    "megatron-core": "ddp",
}
Precision = Literal["fp32", "bf16", "fp16"]
Starter = Literal["deepspeed", "ssh"]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$")]
Argument = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00']+$")]
ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)]
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS)]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    number, unit = value[:-1], value[-1:]
    if unit not in _UNITS or not number.isdecimal() or len(number) > 9:
        raise ValueError("must be a whole number of seconds, or one with its unit as in 90s, 30m, 12h, 7d")
    return int(number) * _UNITS[unit]


Seconds = Annotated[Positive, BeforeValidator(_seconds)]
MasterPort = Annotated[int, Field(ge=1024, le=65535)]


class Parallel(Section):
    """How the model and its state are distributed over the ranks."""

    strategy: Strategy = Field(
        default="zero",
        description="ddp (the engine's own, without DeepSpeed; the only strategy of megatron-core), fsdp"
        " (engine torch: weights, gradients and optimizer states sharded) or zero (DeepSpeed, stages 0 to 3).",
    )
    data_parallel_shard_size: Ranks | None = Field(
        default=None,
        description="Strategy fsdp: number of ranks that shard one replica of the states; the other ranks hold replicas"
        " (hybrid sharding). Default: all data parallel ranks.",
    )
    reduce_gradients_once: bool = Field(
        default=False,
        description="Strategy fsdp without a pipeline: reduce-scatter gradients once per step, not after each"
        " micro-batch. Less traffic, but each rank keeps all gradients in fp32 until then.",
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = Field(
        default="1f1b",
        description="Engine torch: the pipeline schedule; interleaved needs"
        " virtual_pipeline_model_parallel_size above 1.",
    )
    zero_stage: ZeroStage = Field(
        default=0,
        description="What DeepSpeed's ZeRO partitions: 1 optimizer states, 2 also gradients, 3 also parameters.",
    )
    tensor_model_parallel_size: Ranks = Field(default=1, description="Ranks that split each layer.")
    pipeline_model_parallel_size: Ranks = Field(
        default=1, description="Pipeline stages that the layers are divided into."
    )
    virtual_pipeline_model_parallel_size: Layers = Field(
        default=1,
        description="Engines megatron-core and torch: model chunks per pipeline stage, for the interleaved schedule.",
    )
    decoder_first_pipeline_num_layers: Layers | None = Field(
        default=None,
        description="Engine megatron-core: layers of the first pipeline stage. Default: as many as the stages between"
        " the first and the last one.",
    )
    decoder_last_pipeline_num_layers: Layers | None = Field(
        default=None,
        description="Engine megatron-core: layers of the last pipeline stage, which also has the output layer. Default:"
        " as many as the stages between the first and the last one.",
    )
    use_tp_pp_dp_mapping: bool = Field(
        default=False,
        description="Engines megatron-core and torch: number the ranks so that the stages of a pipeline are adjacent,"
        " within a node where they fit, and data parallel replicas are not; like Megatron's option of this name.",
    )
    context_parallel_size: Ranks = Field(
        default=1, description="Engine megatron-core: ranks that split the tokens of each sample."
    )
    expert_model_parallel_size: Ranks = Field(
        default=1,
        description="Engine megatron-core: ranks over which the experts of a layer are distributed (all-to-all): data,"
        " context or tensor parallel ranks of a pipeline stage.",
    )
    expert_tensor_parallel_size: Ranks | None = Field(
        default=None,
        description="Engine megatron-core: ranks that split each expert. Default: tensor_model_parallel_size.",
    )
    sequence_parallel: bool = Field(
        default=False, description="Engine megatron-core: partition tokens between tensor parallel layers."
    )
    use_distributed_optimizer: bool = Field(
        default=False, description="Engine megatron-core: shard the optimizer's states over the data parallel ranks."
    )
    tp_comm_overlap: bool | None = Field(
        default=None,
        description="Engine megatron-core with TransformerEngine's layers: tensor parallel ranks of a node exchange"
        " parts of a matrix while they compute others, with CUDA multicast. Default: where all of them can.",
    )

    @property
    def splits_model(self) -> bool:
        """Whether tensor parallel ranks or pipeline stages have parts of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size > 1

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of the experts: ranks that split one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size


class Batch(Section):
    """Samples per step."""

    micro_batch_size: Many = Field(description="Samples per forward pass on one rank.")
    global_batch_size: Many | None = Field(
        default=None,
        description="Samples per optimizer step: micro batch x data parallel size x accumulation steps."
        " Default: no accumulation.",
    )

    def samples_per_step(self, data_parallel_size: int) -> int:
        """``global_batch_size``, or Megatron's default: one micro-batch per replica, without accumulation."""
        return self.global_batch_size or self.micro_batch_size * data_parallel_size

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """The micro-batches of a replica in one step, if they divide ``samples_per_step``."""
        return self.samples_per_step(data_parallel_size) // (self.micro_batch_size * data_parallel_size)


class Optimizer(Section):
    """AdamW and its learning rate schedule."""

    lr: float = Field(default=1.5e-4, gt=0.0, description="Peak learning rate.")
    min_lr: float = Field(default=1.0e-5, ge=0.0, description="Learning rate at the end of the decay.")
    lr_decay_style: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Shape of the decay.")
    lr_warmup_iters: Count = Field(default=0, description="Iterations of linear warm-up from zero.")
    lr_warmup_fraction: Fraction | None = Field(
        default=None,
        description="Warm-up as a fraction of lr_decay_iters, like Megatron's --lr-warmup-fraction and --warmup in"
        " v1.1.5; instead of lr_warmup_iters.",
    )
    lr_decay_iters: Positive | None = Field(
        default=None, description="Iteration at which the learning rate reaches min_lr. Default: train_iters."
    )
    weight_decay: float = Field(default=0.01, ge=0.0, description="Decoupled weight decay; not on biases and norms.")
    adam_beta1: Fraction = Field(default=0.9, description="Decay of the first moment.")
    adam_beta2: Fraction = Field(default=0.999, description="Decay of the second moment.")
    adam_eps: float = Field(default=1e-8, gt=0.0, description="Added to the denominator.")
    clip_grad: float = Field(default=1.0, ge=0.0, description="Maximum global gradient norm; 0 turns clipping off.")


class LossScale(Section):
    """fp16 only. ``loss_scale: 0`` is dynamic, as in Megatron and DeepSpeed."""

    loss_scale: float = Field(default=0.0, ge=0.0, description="Fixed loss scale; 0 for a dynamic one.")
    initial_scale_power: Annotated[Count, Field(le=127)] = Field(
        default=16, description="The dynamic scale starts at 2 to this power."
    )
    loss_scale_window: Positive = Field(
        default=1000, description="Steps without overflow before the dynamic scale doubles."
    )
    hysteresis: Positive = Field(default=2, description="Overflows before the dynamic scale halves.")


Prompt = Annotated[str, StringConstraints(max_length=2000)]
Prompts = Annotated[tuple[Prompt, ...], AS_TUPLE, Field(max_length=16)]


def _training_field(value: str) -> str:
    if value not in TRAINING:
        raise ValueError(f"must be one of {', '.join(TRAINING)}")
    return value


TrainingFields = Annotated[tuple[Annotated[str, AfterValidator(_training_field)], ...], AS_TUPLE]


class Train(Section):
    """Length of the run, logging, evaluation and checkpoints."""

    train_iters: Positive = Field(description="Optimizer steps.")
    log_interval: Positive = Field(default=10, description="Iterations between log lines.")
    eval_interval: Count = Field(default=0, description="Iterations between evaluations; 0 for none.")
    eval_iters: Positive = Field(default=10, description="Batches per evaluation.")
    sample_prompts: Prompts = Field(
        default=(),
        description="Texts that the model continues at every evaluation, or at the end if eval_interval is 0:"
        " shown on the report page, on the live page and by trackers. Uses the tokenizer of the data, as"
        " tridock generate does; each new token takes a forward pass.",
    )
    sample_tokens: Positive = Field(default=32, description="Maximum number of tokens to generate per prompt.")
    save_interval: Count = Field(default=0, description="Iterations between checkpoints; 0: only at the end.")
    save: bool = Field(default=True, description="Write checkpoints to the run folder.")
    keep_checkpoints: Positive | None = Field(
        default=None,
        description="Number of complete checkpoints to keep; older ones are removed once a new one is complete."
        " Default: all.",
    )
    async_save: bool = Field(
        default=True,
        description="Write checkpoints in the background: training pauses only while the state is copied to host"
        " memory. The last checkpoint is written synchronously.",
    )
    checkpoint_copies: int = Field(
        default=1,
        ge=1,
        le=2,
        description="Number of nodes with each file of a checkpoint, where nodes do not share the folder: with 2 each"
        " sends its files to the next one, in the background with async_save, and a lost node costs no checkpoint.",
    )
    checkpoint_folder: PathText | None = Field(
        default=None, description="Folder for checkpoints, instead of the run folder."
    )
    load: PathText | None = Field(
        default=None,
        description="Checkpoint folder to resume from (of a run: runs/<run-id>/checkpoints). May be the same as"
        " checkpoint_folder: the first run then starts from scratch, later ones resume. Or start from weights:"
        " hf:FOLDER, a transformers model folder; deepspeed:FOLDER, a checkpoint of DeepSpeed (ZeRO 0 to 3) of such a"
        " model; megatron:FOLDER, a GPT-2 or Llama of Megatron-LM v1.1.5 or later.",
    )
    override_checkpoint: TrainingFields = Field(
        default=(),
        description="Fields of the training, such as optimizer.lr, whose values here replace those that the checkpoint"
        " of load was saved with. Any other difference that changes the losses is refused (docs/checkpoints.md).",
    )
    seed: Count = Field(
        default=1234, description="Random seed of the weights, of dropout and of the order of the data."
    )
    compile: bool = Field(
        default=False, description="Engine torch: compile the layers with torch.compile, in the first step."
    )
    tf32: bool = Field(
        default=False,
        description="Compute fp32 matrix products and convolutions in TensorFloat-32, on GPUs that support it: faster,"
        " with 10 bits of mantissa. Overrides the environment of the image.",
    )
    tensorboard: bool = Field(default=True, description="Write TensorBoard files to the run folder.")
    profile_iters: Count = Field(
        default=0,
        description="Run the last N iterations under torch's profiler: traces in the run's profile/, and the"
        " share of their time that is communication. 0 for none.",
    )

    @property
    def pretrained(self) -> tuple[str, str] | None:
        """Format and folder in ``load: FORMAT:DIR``, of weights to start from; None if ``load`` names none."""
        format_, _, folder = (self.load or "").partition(":")
        return (format_, folder) if format_ in FORMATS else None

    @property
    def pretrained_folder(self) -> str | None:
        """The folder of :attr:`pretrained`."""
        return self.pretrained[1] if self.pretrained is not None else None

    @property
    def loads_own_folder(self) -> bool:
        """Whether ``load`` is the folder in which the run saves, as with --save and --load of Megatron's scripts."""
        folders = (self.checkpoint_folder, self.load)
        return None not in folders and len({posixpath.normpath(folder or "") for folder in folders}) == 1


class Launch(Section):
    """How the ranks start."""

    launcher: Starter = Field(
        default="deepspeed",
        description="How tridock launch starts ranks on several nodes: deepspeed (DeepSpeed's launcher over pdsh), or"
        " ssh, which starts seconds earlier because it does not first import torch and DeepSpeed on every node.",
    )
    master_port: MasterPort | None = Field(
        default=None, description="Rendezvous port on the head. Default: a free port."
    )
    allow_other_tokenizer: bool = Field(
        default=False,
        description="Start although the data were made with another tokenizer than that of train.load, or than that of"
        " data.vocab_file: for tokenizers that are the same to the model, such as one with more tokens.",
    )
    hang_timeout: Count = Field(
        default=30,
        description="Seconds without progress after which a rank counts as hung and the run is ended, but at least"
        " three of its longest steps, and 1800 s until it has measured some; 0 for never (for a debugger). torch's"
        " own timeout of collectives is a week, or twice this if that is longer.",
    )


class Restart(Section):
    """Restarts of a failed run from its last checkpoint."""

    max: Count = Field(default=0, description="Maximum number of restarts.")
    window: Seconds | None = Field(
        default=None,
        description="Period over which restarts are counted: in seconds, or as 90s, 30m, 12h, 7d. Default: the whole"
        " run.",
    )
    node_timeout: Annotated[Seconds, Field(ge=30)] = Field(
        default=60,
        description="How long to wait for a lost node to come back, from the end of the run, before a spare takes its"
        " place or the run continues with fewer data parallel replicas.",
    )
    min_nodes: Positive = Field(
        default=1, description="Minimum number of nodes to continue with; with fewer, the run ends."
    )


class Experiment(Section):
    """What to train, how, and for how long."""

    name: Name = Field(description="Short name; every run id starts with it.")
    engine: Engine = Field(default="torch", description="The training code.")
    program: str | None = Field(
        default=None,
        description="Another program, as a plan describes it (docs/planner.md). It can only be planned, not started.",
    )
    model: Model
    parallel: Parallel = Field(default_factory=Parallel)
    batch: Batch
    data: Data
    optimizer: Optimizer = Field(default_factory=Optimizer)
    precision: Precision = Field(default="bf16", description="Precision of the forward and backward pass.")
    fp16: LossScale = Field(default_factory=LossScale)
    train: Train
    launch: Launch = Field(default_factory=Launch)
    restart: Restart = Field(default_factory=Restart)
    trackers: Trackers = ()
    notify: Notifications = ()
    megatron_args: Annotated[tuple[Argument, ...], AS_TUPLE] = Field(
        default=(), description="Engine megatron-deepspeed: Megatron command line arguments that have no field here."
    )
    deepspeed: Annotated[dict[str, Any], AfterValidator(as_json)] = Field(
        default_factory=dict,
        description="Strategy zero: your own DeepSpeed JSON, or the path of one. Options that are also fields here set"
        " those that you left out; others, such as ZeRO's bucket sizes, go to DeepSpeed (docs/megatron.md).",
    )
    env: RankEnv = Field(default_factory=dict, description=ENV)

    @model_validator(mode="before")
    @classmethod
    def _from_deepspeed_json(cls, fields: Any) -> Any:
        return with_fields_of(fields) if isinstance(fields, Mapping) else fields

    @model_validator(mode="before")
    @classmethod
    def _default_strategy(cls, fields: Any) -> Any:
        # This section's default depends on another section's value.
        engine = fields.get("engine") if isinstance(fields, dict) else None
        if isinstance(engine, str) and engine in DEFAULT_STRATEGY:
            parallel = fields.get("parallel", {})
            if isinstance(parallel, dict):
                return {**fields, "parallel": {"strategy": DEFAULT_STRATEGY[engine], **parallel}}
        return fields

    def resolved(self, data_parallel_size: int) -> Self:
        """Returns the experiment with the values that depend on the cluster, as the run folder stores it."""
        samples = self.batch.samples_per_step(data_parallel_size)
        # Keeps the global batch explicit: it stays the same if the run later continues with fewer replicas.
        deepspeed = {name: value for name, value in self.deepspeed.items() if name != "gradient_accumulation_steps"}
        return self.with_fields({"batch.global_batch_size": samples, "deepspeed": deepspeed})

    def with_fields(self, fields: Mapping[str, object]) -> Self:
        """Returns the experiment with other values of ``fields``, by path. They are not checked."""
        parts: dict[str, dict[str, object]] = {}
        update: dict[str, object] = {}
        for path, value in fields.items():
            section, _, name = path.partition(".")
            if name:
                parts.setdefault(section, {})[name] = value
            else:
                update[path] = value
        update |= {section: getattr(self, section).model_copy(update=names) for section, names in parts.items()}
        return self.model_copy(update=update)


TRAINING: Final = (
    *("model.seq_length", "model.activation_func", "model.hidden_dropout", "model.attention_dropout", "model.fp8"),
    *("model.moe_router_load_balancing_type", "model.moe_aux_loss_coeff"),
    *("batch.global_batch_size", "data.data_path", "data.train_data_path", "data.split"),
    *("train.seed", "train.tf32", "megatron_args"),
    *(f"optimizer.{name}" for name in Optimizer.model_fields),
    "precision",
    *(f"fp16.{name}" for name in LossScale.model_fields if name != "initial_scale_power"),
)
"""Fields that decide how a training continues, by path; model and layout must fit its checkpoint in any case."""
