"""Multi-tensor kernels, which megatron-core imports from transformer-engine or apex, for images with neither.

megatron-core's own replacements launch a kernel per tensor, and read each tensor's norm from the GPU: they wait for the
GPU once per weight in every step.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer
from torch import Tensor


def install() -> None:
    """Replaces megatron-core's own versions with torch's foreach kernels; leaves those of other packages."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    for module in (clip_grads, optimizer):
        if module.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
            module.multi_tensor_scale_impl = scale


def l2_norm(
    _chunk_size: int, _overflow: Tensor, tensors: Sequence[Sequence[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """Returns the 2-norm of all tensors as one vector, fp32 [1], on their device."""
    norms = torch._foreach_norm([tensor for group in tensors for tensor in group])
    return torch.linalg.vector_norm(torch.stack(norms).float()).view(1), None


def scale(_chunk_size: int, _overflow: Tensor, tensors: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Sets the second list's tensors to ``factor`` times those of the first."""
    sources, targets = map(list, tensors)
    if any(a is not b for a, b in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    if factor != 1.0:
        torch._foreach_mul_(targets, factor)


def read_norm_once(optimizer: Any, device: torch.device) -> None:
    """Replaces how a chain of optimizers finds the gradient's norm, unless megatron-core reads only one already.

    Without the distributed optimizer it sums the squares of experts' gradients and those of the others in different
    groups of ranks, and reads each of the two norms from the GPU.
    """
    if not optimizer.grads_states_parallel_group_is_shared():
        optimizer.get_grad_norm = partial(_norm, optimizer.chained_optimizers, device)


@torch.no_grad()
def _norm(optimizers: Sequence[Any], device: torch.device) -> float:
    overflow = torch.empty(0)  # unused by torch's kernels
    squares = []
    for one in optimizers:
        gradients = (getattr(one, "get_main_grads_for_grad_norm", None) or one.get_grads_for_grad_norm)()  # 0.16, 0.19
        square = l2_norm(0, overflow, [gradients], False)[0] ** 2 if gradients else torch.zeros(1, device=device)
        dist.all_reduce(square, group=one.get_grad_stats_parallel_group())
        squares.append(square)
    return math.sqrt(torch.cat(squares).sum().item())
