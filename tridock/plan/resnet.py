"""What stands against a model of images, and what of it stays in memory for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.resnet import cast_elements, kept_elements
from tridock.layout.shape import FORMAT_BYTES, Term

_FP32_BYTES: Final = 4


def resnet_problems(experiment: Experiment) -> Iterator[Problem]:
    """Engine torch has it, shared out by DDP or FSDP, and the others have none."""
    model, parallel = experiment.model, experiment.parallel
    if not model.is_vision:
        return
    if experiment.engine != "torch":
        what, todo = f"engine {experiment.engine} has no model of images", "use engine torch"
        yield Problem("model.preset", what, "resnet50", todo)
    if parallel.strategy == "zero":
        what, todo = "preset resnet50 goes with ddp and fsdp", "use one of them"
        yield Problem("parallel.strategy", what, "zero", todo, ("ddp", "fsdp"))
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(parallel, field)) != 1:
            yield Problem(f"parallel.{field}", "preset resnet50 is not split", str(size), "set it to 1", (1,))
    if model.checkpoint_activations:
        what, todo = "preset resnet50 keeps its activations", "leave it out"
        yield Problem("model.checkpoint_activations", what, "true", todo, ("false",))
    if experiment.train.compile:
        what, todo = "preset resnet50 is not compiled", "leave it out"
        yield Problem("train.compile", what, "true", todo, ("false",))


def image_terms(experiment: Experiment) -> list[Term]:
    """What a micro-batch leaves for its backward pass; within 2 % of what a CPU rank keeps (tests/unit/train)."""
    short = FORMAT_BYTES[experiment.precision]
    kept = kept_elements(experiment.model) * experiment.batch.micro_batch_size * short
    terms = [Term("activations", kept, "each convolution's input and output")]
    if experiment.parallel.strategy == "ddp" and short < _FP32_BYTES:
        copies = cast_elements(experiment.model) * short
        terms.append(Term("copies of weights", copies, "autocast's, in the short format, kept for the backward pass"))
    return terms
