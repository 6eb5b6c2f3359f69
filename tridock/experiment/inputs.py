"""What the files that an experiment names must be like: its data, its tokenizer, the checkpoint that it goes on from.

The files are read elsewhere; here are only their facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tridock.errors import Problem
from tridock.experiment.schema import Experiment

IMAGE_SUFFIXES = ("_images.npy", "_labels.npy")
"""After ``data.data_path``, of a model of images."""
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """What a checkpoint of Megatron-LM v1.1.5 fits: it loads on the layout that wrote it, and on no other."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    strategy: str
    zero_stage: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int

    @classmethod
    def of(cls, experiment: Experiment, data_parallel_size: int) -> CheckpointLayout:
        """That of an experiment's own checkpoints."""
        parallel, model = experiment.parallel, experiment.model
        return cls(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            data_parallel_size,
            parallel.strategy,
            parallel.zero_stage,
            *(getattr(model, name) for name in _SHAPE),
        )

    def to_json(self) -> dict[str, Any]:
        """What the file beside the checkpoint holds."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.data_parallel_size)
        strategy = f"ZeRO-{self.zero_stage}" if self.strategy == "zero" else self.strategy.upper()
        return "TP{} PP{} DP{}, ".format(*sizes) + strategy


def data_problems(
    experiment: Experiment, manifest: Mapping[str, Any] | None, tokenizer: int | None
) -> Iterator[Problem]:
    """A vocabulary or a sequence that does not match the data.

    ``manifest`` is ``<data_path>.json``; without one (Megatron's own tools write none) nobody knows before the ranks
    read. ``tokenizer`` is the number of tokens in ``data.vocab_file``, where the engine reads it.
    """
    tokens, total = (manifest.get(name) if isinstance(manifest, Mapping) else None for name in ("vocab_size", "tokens"))
    if tokens is not None and tokenizer is not None and tokens != tokenizer:
        # A smaller one ends deep inside an embedding; a larger one is another.
        todo = "name the files of the tokenizer that made the data"
        yield Problem("data.vocab_file", f"the data was made with {tokens} tokens", f"{tokenizer} tokens", todo)
    given = experiment.model.vocab_size
    if tokens is not None and given is not None and given < tokens:
        what = f"is smaller than the tokenizer of the data, which has {tokens} tokens"
        yield Problem("model.vocab_size", what, str(given), "leave it out, or raise it")
    if total is not None and total <= experiment.model.seq_length:
        what, todo = f"is longer than all of the data, {total} tokens", "lower it, or name a larger data set"
        yield Problem("model.seq_length", what, str(experiment.model.seq_length), todo)


def checkpoint_problems(
    experiment: Experiment, data_parallel_size: int, written: Mapping[str, Any] | None
) -> Iterator[Problem]:
    """Engine megatron-deepspeed; ``written`` is the layout beside the checkpoint of ``train.load``.

    Without one (upstream's own checkpoints) nobody knows before the ranks read it.
    """
    if experiment.engine != "megatron-deepspeed" or not isinstance(written, Mapping):
        return
    ours = CheckpointLayout.of(experiment, data_parallel_size)
    # What a file of another release leaves out is taken for the same.
    theirs = replace(ours, **{name: written[name] for name in ours.to_json() if name in written})
    shape = [name for name in _SHAPE if getattr(theirs, name) != getattr(ours, name)]
    for name in shape:
        what = f"the checkpoint of train.load has {getattr(theirs, name)}"
        todo = f"set it to {getattr(theirs, name)}, or leave train.load out"
        yield Problem(f"model.{name}", what, str(getattr(ours, name)), todo)
    if str(theirs) != str(ours):
        what = f"was written with {theirs}, and Megatron v1.1.5 loads a checkpoint on no other layout"
        todo = "go back to that layout, or use engine megatron-core, whose checkpoints load on any"
        yield Problem("train.load", what, f"{ours} here", todo)
