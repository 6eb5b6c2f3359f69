"""The norm of a mixture of experts' gradient, read from the device once.

Without the distributed optimizer megatron-core sums the squares of experts' gradients and those of the others in
different groups of ranks, and reads each of the two norms from the GPU.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tridock.train.megatron_core.multi_tensor import l2_norm


def read_once(optimizer: Any, device: torch.device) -> None:
    """Replaces how a chain of optimizers finds the norm, unless megatron-core reads only one already."""
    if not optimizer.grads_states_parallel_group_is_shared():
        optimizer.get_grad_norm = partial(_norm, optimizer.chained_optimizers, device)


@torch.no_grad()
def _norm(optimizers: Sequence[Any], device: torch.device) -> float:
    overflow = torch.empty(0)  # unused by torch's kernels
    squares = []
    for one in optimizers:
        gradients = one.get_main_grads_for_grad_norm()
        square = l2_norm(0, overflow, [gradients], False)[0] ** 2 if gradients else torch.zeros(1, device=device)
        dist.all_reduce(square, group=one.get_grad_stats_parallel_group())
        squares.append(square)
    return math.sqrt(torch.cat(squares).sum().item())
