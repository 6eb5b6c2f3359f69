"""Several runs of engine megatron-core (``several.py``), with a stand-in for apex's kernel that accumulates gradients.

``fused`` or ``apart`` says whether it is there. Prints how many gradients it added.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import Tensor

from tests.distributed import several


def main() -> None:
    fused, end, added = sys.argv.pop(1) == "fused", several.end, 0

    def add(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
        nonlocal added
        added += 1
        total.addmm_(gradients.t(), inputs)

    def tell(*given: Any, **named: Any) -> None:
        print(f"added: {added}", flush=True)
        end(*given, **named)

    layers._grad_accum_fusion_available = fused
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)  # type: ignore[attr-defined]
    several.end = tell  # type: ignore[attr-defined,assignment]
    several.main()


if __name__ == "__main__":
    main()
