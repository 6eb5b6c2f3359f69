"""``tridock.json`` of a checkpoint: the progress of its run, and the check that it fits an experiment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tridock.contracts.checkpoints import PROGRESS
from tridock.contracts.events import Cause
from tridock.engines import ENGINES, engine_of
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.experiment.weights import position_rows
from tridock.train.rank.process_group import Ranks

_MODEL: Final = (
    *("num_layers", "hidden_size", "num_attention_heads", "normalization", "norm_epsilon", "qk_layernorm", "swiglu"),
    *("position_embedding_type", "rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor"),
    *("add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights"),
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

    @classmethod
    def of(cls, experiment: Experiment, ranks: Ranks, vocab_size: int | None, padded_vocab_size: int) -> Progress:
        """Returns the progress at the start of an experiment."""
        model = experiment.model
        return cls(
            iteration=0,
            consumed_samples=0,
            strategy=engine_of(experiment).checkpoint_strategy(experiment),
            zero_stage=experiment.parallel.zero_stage if experiment.parallel.strategy == "zero" else 0,
            precision=experiment.precision,
            data_parallel_size=ranks.world_size,
            model={
                **{name: getattr(model, name) for name in _MODEL},
                "kv_channels": None if model.attention_size == model.hidden_size else model.kv_channels,
                "num_query_groups": None if model.query_groups == model.num_attention_heads else model.query_groups,
                **_of_experts(model),
                "ffn_hidden_size": None if model.ffn_size == model.usual_ffn_size else model.ffn_size,
                "max_position_embeddings": position_rows(model) or None,
                "padded_vocab_size": padded_vocab_size,
            },
            engine=experiment.engine,
            use_distributed_optimizer=experiment.parallel.use_distributed_optimizer,
            vocab_size=vocab_size,
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
    try:
        return Progress(**json.loads((folder / PROGRESS).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = "use another checkpoint: this one is incomplete"
        raise RequestError(Problem(str(folder / PROGRESS), "cannot be read", got, todo)) from None


def check_fit(folder: Path, saved: Progress, wanted: Progress) -> None:
    """Raises :class:`RequestError` with every difference if a checkpoint has another model or layout."""
    pairs = [(f"model.{name}", saved.model[name], value) for name, value in wanted.model.items() if name in saved.model]
    pairs.append(("engine", saved.engine, wanted.engine))
    pairs.append(("parallel.strategy", saved.strategy, wanted.strategy))
    for path in ENGINES[wanted.engine].checkpoint_fields:
        name = path.rpartition(".")[2]
        pairs.append((path, getattr(saved, name), getattr(wanted, name)))
    if wanted.strategy == "zero":
        # DeepSpeed stores the optimizer in the layout of the stage and precision.
        pairs.append(("parallel.zero_stage", saved.zero_stage, wanted.zero_stage))
        pairs.append(("precision", saved.precision, wanted.precision))
    problems = [
        Problem(
            name,
            f"the checkpoint {folder} was saved with {there}",
            str(here),
            "use the same, or start from scratch",
            cause=Cause.CHECKPOINT_MISMATCH,
        )
        for name, there, here in pairs
        if there != here
    ]
    if problems:
        raise RequestError(problems)
