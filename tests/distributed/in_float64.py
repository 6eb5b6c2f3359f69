"""Several runs of engine megatron-core (``several.py``) that compute in fp64 what they compute in fp32 otherwise.

Layouts that differ only in the order of their sums then agree to 1e-12; one that sums something else does not.
"""

from __future__ import annotations

from typing import Any

import torch


def main() -> None:
    # By its attributes, before anything else is imported: Megatron and Tridock name the format, also as a default.
    renamed: Any = torch
    renamed.float32 = renamed.float = torch.float64
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment,method-assign]

    from megatron.core.optimizer import optimizer

    from tests.distributed import several

    optimizer.clip_grad_by_total_norm_fp32 = clip  # Megatron's accepts fp32 only
    several.main()


def clip(parameters: list[torch.Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Scales the gradients as Megatron does."""
    scale = max_norm / (total_norm + 1e-6)
    for parameter in parameters:
        if parameter.grad is not None and scale < 1.0:
            parameter.grad.mul_(scale)


if __name__ == "__main__":
    main()
