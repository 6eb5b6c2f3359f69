"""Several runs of engine ``torch`` (``several.py``), with files instead of libaio, and smaller tensors on NVMe.

DeepSpeed's op needs a compiler and libaio; here a handle of it reads and writes at once. tests/integration has the op.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
from torch import Tensor

from tests.distributed import several

LEAST = 4096
"""Bytes of a tensor on NVMe. Set the options of ``aio`` to it too: its blocks are no larger."""


class Handle:
    """What DeepSpeed calls of its ``aio_handle``."""

    def __init__(self, **_: Any) -> None:
        self.waiting = 0
        self.locked: list[Tensor] = []

    def async_pread(self, buffer: Tensor, path: str, _offset: int) -> int:
        content = Path(path).read_bytes()
        assert len(content) == buffer.nbytes, f"{path} has {len(content)} bytes, not {buffer.nbytes}"
        buffer.view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.waiting += 1
        return 0

    def async_pwrite(self, buffer: Tensor, path: str, _offset: int) -> int:
        Path(path).write_bytes(buffer.view(torch.uint8).numpy().tobytes())
        self.waiting += 1
        return 0

    def wait(self) -> int:
        waited, self.waiting = self.waiting, 0
        return waited

    def new_cpu_locked_tensor(self, count: int, like: Tensor) -> Tensor:
        self.locked.append(torch.full((count,), torch.nan, dtype=like.dtype))
        return self.locked[-1]

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        return bool(buffer.numel())

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.untyped_storage().data_ptr()
        return any(start == one.untyped_storage().data_ptr() for one in self.locked)


def main() -> None:
    AsyncIOBuilder.load = lambda *_, **__: SimpleNamespace(aio_handle=Handle)
    optimizer_utils.MIN_AIO_BYTES = partitioned_param_swapper.MIN_AIO_BYTES = LEAST
    several.main()


if __name__ == "__main__":
    main()
