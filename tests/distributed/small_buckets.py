"""Several runs of engine megatron-core (``several.py``), whose gradient buckets hold a few weights.

``overlap`` or ``wait`` says whether they travel during the backward pass, and weights during the forward pass. Prints
how many exchanges this rank began without waiting for them.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer

from tests.distributed import several
from tridock.train.megatron_core import model


def main() -> None:
    overlap = sys.argv.pop(1) == "overlap"
    begin, end, started = param_and_grad_buffer._coalescing_manager, several.end, 0

    def config(**given: Any) -> DistributedDataParallelConfig:
        wanted = {name: value and overlap for name, value in given.items() if name.startswith("overlap_")}
        return DistributedDataParallelConfig(**{**given, **wanted, "bucket_size": 2000})

    def counted(*given: Any, async_ops: bool) -> Any:
        nonlocal started
        started += async_ops
        return begin(*given, async_ops=async_ops)

    def tell(*given: Any, **named: Any) -> None:
        print(f"started: {started}", flush=True)
        end(*given, **named)

    model.DistributedDataParallelConfig = config  # type: ignore[attr-defined,misc,assignment]
    param_and_grad_buffer._coalescing_manager = counted
    several.end = tell  # type: ignore[attr-defined,assignment]
    several.main()


if __name__ == "__main__":
    main()
