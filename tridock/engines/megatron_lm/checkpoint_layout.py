"""The layout of a checkpoint of Megatron-LM v1.1.5, and the training that it is from."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.training import training_fields, training_problems

TRAINING = "training"
"""The key of the file beside the checkpoint under which :func:`training_fields` are."""
UPDATES = "updates"
"""The key under which the steps so far that updated the parameters are."""
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The layout of a checkpoint of Megatron-LM v1.1.5, which loads only on the layout that wrote it."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    strategy: str
    zero_stage: int
    num_layers: int
    hidden_size: int
    num_attention_heads: int

    @classmethod
    def of(cls, experiment: Experiment, data_parallel_size: int) -> Self:
        """Returns the layout of the checkpoints that an experiment writes."""
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
        """Returns the content of the file beside the checkpoint."""
        return asdict(self)

    def __str__(self) -> str:
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.data_parallel_size)
        strategy = f"ZeRO-{self.zero_stage}" if self.strategy == "zero" else self.strategy.upper()
        return "TP{} PP{} DP{}, ".format(*sizes) + strategy


def checkpoint_problems(experiment: Experiment, data_parallel_size: int, written: object) -> Iterator[Problem]:
    """Yields differences in layout and training. ``written`` is what the checkpoint of ``train.load`` says.

    Without one (upstream's own checkpoints) the layout is unknown until the ranks read the checkpoint.
    """
    if not isinstance(written, Mapping) or _SHAPE[0] not in written:
        return
    ours = CheckpointLayout.of(experiment, data_parallel_size)
    # Fields that another release's file leaves out count as equal.
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
    if isinstance(saved := written.get(TRAINING), Mapping):
        train = experiment.train
        # Upstream, and DeepSpeed, load the loss scaler.
        fixed = ("precision", "fp16.")
        yield from training_problems(train.load, saved, training_fields(experiment), train.override_checkpoint, fixed)
