"""``tridock.json`` of a checkpoint: the progress of its run, and whether it fits an experiment."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tridock.contracts.checkpoints import PROGRESS
from tridock.contracts.events import Cause
from tridock.engines import ENGINES, program_of
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.experiment.parameters import position_rows
from tridock.experiment.schema import Experiment
from tridock.experiment.training import training_fields, training_problems

_MODEL: Final = (
    *("num_layers", "hidden_size", "num_attention_heads", "normalization", "norm_epsilon", "qk_layernorm", "swiglu"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor"),
    *("rope_scaling_type", "original_max_position_embeddings", "qk_layernorm_all_heads", "use_post_norm"),
    "no_rope_freq",
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("add_bias_linear", "add_qkv_bias", "add_attention_bias", "untie_embeddings_and_output_weights"),
)
"""Fields that determine the meaning of the weights."""
_EXPERTS: Final = (
    *("num_moe_experts", "moe_router_topk", "moe_router_pre_softmax"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
)
"""And of those of a mixture of experts."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run, and the fields that a checkpoint must match."""

    iteration: int
    consumed_samples: int
    strategy: str
    zero_stage: int
    precision: str
    data_parallel_size: int
    model: dict[str, int | float | bool | str | None]
    engine: str = "torch"
    use_distributed_optimizer: bool = False
    vocab_size: int | None = None
    """Number of tokens in the vocabulary, without padding."""
    tokenizer_sha256: str | None = None
    """The tokenizer of the data, by its manifest."""
    training: dict[str, str] = field(default_factory=dict)
    """As :func:`training_fields` returns them."""
    updates: int | None = None
    """The steps so far that updated the parameters; None in older checkpoints."""

    @classmethod
    def of(cls, experiment: Experiment, data_parallel_size: int, vocab_size: int | None) -> Progress:
        """Returns the progress at the start of an experiment, whose vocabulary, if it has one, may not be known yet."""
        model = experiment.model
        multiple = 1 if model.is_vision else model.make_vocab_size_divisible_by
        rows = {} if vocab_size is None else {"padded_vocab_size": -(-vocab_size // multiple) * multiple}
        return cls(
            iteration=0,
            consumed_samples=0,
            strategy=program_of(experiment).checkpoint_strategy(experiment),
            zero_stage=experiment.parallel.zero_stage if experiment.parallel.strategy == "zero" else 0,
            precision=experiment.precision,
            data_parallel_size=data_parallel_size,
            model={
                **{name: getattr(model, name) for name in _MODEL},
                "kv_channels": None if model.attention_size == model.hidden_size else model.kv_channels,
                "num_query_groups": None if model.query_groups == model.num_attention_heads else model.query_groups,
                **_of_experts(model),
                "ffn_hidden_size": None if model.ffn_size == model.usual_ffn_size else model.ffn_size,
                "max_position_embeddings": position_rows(model) or None,
                **rows,
            },
            engine=experiment.engine,
            use_distributed_optimizer=experiment.parallel.use_distributed_optimizer,
            vocab_size=vocab_size,
            training=training_fields(experiment),
            updates=0,
        )

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


def _of_experts(model: Model) -> dict[str, int | float | bool | str | None]:
    """Returns what a mixture of experts must have in common with a checkpoint; another model has only no experts."""
    if model.num_moe_experts is None:
        return {"num_moe_experts": None}
    return {name: getattr(model, name) for name in _EXPERTS} | {"moe_ffn_hidden_size": model.expert_size}


def read_progress(folder: Path) -> Progress:
    """Reads the progress in a checkpoint. Raises :class:`RequestError` if it is missing or invalid."""
    todo = "use another checkpoint: this one is incomplete"
    with RequestError.in_place_of((OSError, ValueError, TypeError), folder / PROGRESS, "cannot be read", todo):
        return Progress(**json.loads((folder / PROGRESS).read_bytes()))


def check_fit(folder: Path, saved: Progress, wanted: Progress, chosen: Collection[str] = ()) -> None:
    """Raises :class:`RequestError` with everything that :func:`misfits` yields."""
    RequestError.raise_for(misfits(folder, saved, wanted, chosen))


def misfits(folder: Path, saved: Progress, wanted: Progress, chosen: Collection[str] = ()) -> Iterator[Problem]:
    """Yields every field in which a checkpoint has another model or layout than an experiment, or another training,
    unless the field is ``chosen``."""
    pairs = [(f"model.{name}", saved.model[name], value) for name, value in wanted.model.items() if name in saved.model]
    pairs.append(("engine", saved.engine, wanted.engine))
    pairs.append(("parallel.strategy", saved.strategy, wanted.strategy))
    fixed = ENGINES[wanted.engine].program.checkpoint_fields
    for path in fixed:
        name = path.rpartition(".")[2]
        pairs.append((path, getattr(saved, name), getattr(wanted, name)))
    if wanted.strategy == "zero":
        # DeepSpeed stores the optimizer in the layout of the stage and precision, and with it the loss scaler.
        fixed = (*fixed, "fp16.")
        pairs.append(("parallel.zero_stage", saved.zero_stage, wanted.zero_stage))
        pairs.append(("precision", saved.precision, wanted.precision))
    for name, there, here in pairs:
        if there != here:
            what, todo = f"the checkpoint {folder} was saved with {there}", "use the same, or start from scratch"
            yield Problem(name, what, str(here), todo, cause=Cause.CHECKPOINT_MISMATCH)
    known = {name for name, *_ in pairs}
    training = {name: value for name, value in wanted.training.items() if name not in known}
    yield from training_problems(folder, saved.training, training, chosen, fixed)
