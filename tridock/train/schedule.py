"""The learning rate as a pure function of the iteration."""

import math

from tridock.experiment.schema import Optimizer


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
