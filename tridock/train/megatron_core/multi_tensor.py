"""Multi-tensor kernels, which megatron-core imports from transformer-engine or apex, for images with neither.

megatron-core's own replacements launch a kernel per tensor, and read each tensor's norm from the GPU: they wait for the
GPU once per weight in every step.
"""

from collections.abc import Sequence

import torch
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
