"""Stand-ins for the parts of NVIDIA's apex that Megatron v1.1.5 imports, made of torch's own fused operations."""

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_NEEDED = ("apex.optimizers", "apex.normalization.fused_layer_norm", "apex.multi_tensor_apply", "amp_C")


def stand_in(device_type: str) -> list[str]:
    """Registers replacements where apex is missing or incomplete, and on a CPU."""
    if device_type == "cuda" and all(_importable(name) for name in _NEEDED):
        return []
    adam, origin = fused_adam(device_type)
    optimizers = _module("apex.optimizers", FusedAdam=adam)
    layer_norm = _module("apex.normalization.fused_layer_norm", FusedLayerNorm=torch.nn.LayerNorm)
    normalization = _module("apex.normalization", fused_layer_norm=layer_norm, FusedLayerNorm=torch.nn.LayerNorm)
    apply = _module("apex.multi_tensor_apply", multi_tensor_applier=multi_tensor_applier)
    amp = _module("amp_C", multi_tensor_scale=multi_tensor_scale, multi_tensor_l2norm=multi_tensor_l2norm)
    apex = _module("apex", optimizers=optimizers, normalization=normalization, multi_tensor_apply=apply, __path__=[])
    for module in (apex, optimizers, normalization, layer_norm, apply, amp):
        sys.modules[module.__name__] = module
    return [f"apex: FusedAdam is {origin}, FusedLayerNorm is torch.nn.LayerNorm"]


def fused_adam(device_type: str) -> tuple[Callable[..., torch.optim.Optimizer], str]:
    """Returns the fastest AdamW, and its name: on a GPU DeepSpeed's if it is compiled, else torch's fused one."""
    if device_type == "cuda":
        from deepspeed.ops.adam import FusedAdam
        from deepspeed.ops.op_builder import FusedAdamBuilder

        if FusedAdamBuilder().is_compatible(verbose=False) and _loads(FusedAdamBuilder):
            return FusedAdam, "deepspeed.ops.adam.FusedAdam"

    # DeepSpeed compares the optimizer's class with a list: torch's own class is on it, a subclass is not.
    def adam(parameters: Any, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> Any:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)

    return adam, "torch.optim.AdamW(fused=True)"


def multi_tensor_applier(operation: Callable[..., Any], overflow: Tensor, lists: Any, *arguments: Any) -> Any:
    return operation(overflow, lists, *arguments)


def multi_tensor_scale(overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """``target = source * scale``; ``overflow`` becomes 1 where a source is not finite."""
    sources, targets = lists
    for source, target in zip(sources, targets, strict=True):
        if not torch.isfinite(source).all():
            overflow.fill_(1)
        target.copy_(source * scale)


def multi_tensor_l2norm(_overflow: Tensor, lists: Sequence[Sequence[Tensor]], _per_tensor: bool = False) -> Any:
    """Returns the norm of all tensors together, and None for the norms per tensor, which Megatron never requests."""
    norms = torch._foreach_norm(list(lists[0]))
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])), None


def _module(name: str, **names: object) -> ModuleType:
    module = ModuleType(name, "Stand-in by tridock.compat.")
    vars(module).update(names)
    return module


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # an incomplete apex fails in many ways, for example without a CUDA library
        return False
    return True


def _loads(builder: Any) -> bool:
    try:
        builder().load(verbose=False)
    except Exception:  # no compiler, no nvcc, another CUDA: torch's optimizer needs none of them
        return False
    return True
