"""The learning rate as a function of the iteration, without state."""

import math

from tridock.experiment.schema import Optimizer


def learning_rate(iteration: int, optimizer: Optimizer, train_iters: int) -> float:
    """The learning rate of step ``iteration``, counted from 1.

    Linear from 0 over the warm-up (so step 1 takes lr / warmup, and step ``lr_warmup_iters`` the whole lr; of a
    fraction the warm-up may end between two steps), then cosine or linear down to ``min_lr`` at ``lr_decay_iters`` and
    ``min_lr`` from there on, or constant; Megatron-LM's ``OptimizerParamScheduler``. A ``min_lr`` above
    ``lr`` counts as ``lr``.
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
