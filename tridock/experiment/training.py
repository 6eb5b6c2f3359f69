"""What decides the losses of a training besides its model and layout: a checkpoint records it. Pure."""

import math
import shlex
from collections.abc import Collection, Iterator, Mapping

from tridock.contracts.events import Cause
from tridock.differences import flattened, shown
from tridock.errors import Problem
from tridock.experiment.schema import TRAINING, Experiment, Optimizer


def learning_rate(iteration: int, optimizer: Optimizer, train_iters: int) -> float:
    """Returns the learning rate of step ``iteration``, counted from 1, as Megatron-LM's ``OptimizerParamScheduler``.

    It rises linearly from 0 over the warm-up: step 1 has lr / warmup, step ``lr_warmup_iters`` has lr; a warm-up given
    as a fraction may end between two steps. Then it is constant, or falls by a cosine or linearly to ``min_lr`` at
    ``lr_decay_iters`` and stays there. A ``min_lr`` above ``lr`` counts as ``lr``.
    """
    floor = min(optimizer.min_lr, optimizer.lr)
    end = optimizer.lr_decay_iters or train_iters
    fraction = optimizer.lr_warmup_fraction
    warmup = optimizer.lr_warmup_iters if fraction is None else fraction * end
    if iteration <= warmup:
        return optimizer.lr * iteration / warmup
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    if iteration >= end:
        return floor
    progress = (iteration - warmup) / (end - warmup)
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if optimizer.lr_decay_style == "cosine" else 1.0 - progress
    return floor + (optimizer.lr - floor) * remaining


def training_fields(experiment: Experiment) -> dict[str, str]:
    """Returns the fields of :data:`TRAINING` that the experiment uses, by path, with their values as text."""
    optimizer, batch = experiment.optimizer, experiment.batch.global_batch_size
    uses_end = optimizer.lr_decay_style != "constant" or optimizer.lr_warmup_fraction is not None
    end = optimizer.lr_decay_iters or experiment.train.train_iters
    own = {"model.activation_func": experiment.model.gelu, "optimizer.lr_decay_iters": shown(end if uses_end else None)}
    # The batch is not known without a layout.
    unused = (*(() if experiment.precision == "fp16" else ("fp16.",)), *(("batch.",) if batch is None else ()))
    found = dict(flattened(experiment.model_dump(mode="json"))) | own
    return {name: found[name] for name in TRAINING if not name.startswith(unused)}


def training_problems(
    folder: object,
    saved: Mapping[str, str],
    wanted: Mapping[str, str],
    chosen: Collection[str],
    fixed: tuple[str, ...] = (),
) -> Iterator[Problem]:
    """Yields the training fields in which an experiment differs from a checkpoint, unless they are ``chosen``.

    ``fixed``: beginnings of the names of fields whose values are loaded with the checkpoint.
    """
    differing = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    names = ", ".join(sorted({*chosen, *(it for it in differing if not it.startswith(fixed))}))
    choice = f"or choose the new values: --set {shlex.quote(f'train.override_checkpoint=[{names}]')}"
    for name in differing:
        is_fixed = name.startswith(fixed)
        if is_fixed or name not in chosen:
            todo = f"use the same, {'or start from scratch' if is_fixed else choice}"
            what = f"the checkpoint {folder} was saved with {saved[name]}"
            yield Problem(name, what, wanted[name], todo, cause=Cause.CHECKPOINT_MISMATCH)
