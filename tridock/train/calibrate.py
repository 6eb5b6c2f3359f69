"""Measures matrix products, attention, memory and all-reduces on every slot of some nodes, for the planner.

``python -P -m tridock.train.calibrate`` takes the arguments of :mod:`tridock.train.allreduce`; rank 0 prints a
:class:`~tridock.contracts.calibration.Calibration` as JSON. All ranks measure at the same time, because a run also uses
them at the same time.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from tridock.contracts.calibration import Attended, Calibration, Product, Summed
from tridock.train import allreduce

_SHAPES = (
    (1, 1, 1), (1, 4, 1), (1, 1, 4), (4, 1, 1), (4, 4, 1),
    (2, 1, 2), (0.25, 1, 1), (1, 0.25, 1), (1, 1, 0.25), (4, 0.25, 0.25),
)  # fmt: skip
"""Rows, columns and inner dimension, in units of the width whose square product takes about ``_PRODUCT_S``."""
_PRODUCT_S = 0.02
_LENGTHS = ((512, 8), (2048, 2))
"""Tokens and samples of each attention measurement; GPUs measure four times the samples."""
_REPEATS = 7
_AT_MOST_S = 1.0
"""Maximum seconds for one figure, once it has been measured once."""
_MIB = 2**20
_SIZES = {"gloo": (256 << 10, 16 * _MIB), "nccl": (1 * _MIB, 256 * _MIB)}


def main() -> int:
    """Runs this node's ranks as :func:`tridock.train.allreduce.main`; prints the calibration; returns the exit code."""
    return allreduce.main(_measure)


def _measure(rank: int, slot: int, timeout: timedelta, nodes: int) -> object:
    import torch

    device, backend = allreduce.join(rank, slot, timeout)
    on_gpu = device.type == "cuda"
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16, **({"fp16": torch.float16} if on_gpu else {})}
    if on_gpu and not torch.cuda.is_bf16_supported():
        del formats["bf16"]
    properties: Any = torch.cuda.get_device_properties(device) if on_gpu else None
    products = [one for name, kind in formats.items() for one in _products(name, kind, device)]
    short = [name for name in formats if name != "fp32"] or ["fp32"]
    attention = [one for name in (*short, "fp32") for one in _attention(name, formats[name], device)]
    return Calibration(
        device=properties.name if on_gpu else "cpu",
        ranks=int(os.environ["WORLD_SIZE"]),
        units=properties.multi_processor_count if on_gpu else torch.get_num_threads(),
        memory_gb_s=_memory(device),
        launch_s=_launch(device),
        products=tuple(products),
        attention=tuple(attention),
        sums=tuple(_sums(device, backend, nodes)),
    )


def _seconds(work: Callable[[], object], device: Any) -> float:
    """Returns the fastest of a few runs after an uncounted one: other work may slow the rest."""
    import torch

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = once()
    found = [once()]
    while len(found) < _REPEATS and first + sum(found) < _AT_MOST_S:
        found.append(once())
    return min(found)


def _products(name: str, kind: Any, device: Any) -> Iterator[Product]:
    import torch

    def seconds(rows: int, columns: int, inner: int) -> float:
        one = torch.randn(rows, inner, device=device, dtype=kind)
        other = torch.randn(inner, columns, device=device, dtype=kind)
        return _seconds(lambda: one @ other, device)

    start = 2048 if device.type == "cuda" else 256
    width = start * (_PRODUCT_S / seconds(start, start, start)) ** (1 / 3)
    unit = min(8192, max(256, round(width / 256) * 256))
    for shape in _SHAPES:
        rows, columns, inner = (round(unit * size) for size in shape)
        yield Product(name, rows, columns, inner, seconds(rows, columns, inner))


def _attention(name: str, kind: Any, device: Any) -> Iterator[Attended]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    on_gpu = device.type == "cuda"
    heads, size = (32, 128) if on_gpu else (4, 64)
    for length, samples in _LENGTHS:
        number = samples * 4 if on_gpu else max(1, samples // 2)
        shape = (number, heads, length, size)
        inputs = [torch.randn(shape, device=device, dtype=kind, requires_grad=True) for _ in range(3)]
        query, key, value = inputs
        attend = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
        forward = _seconds(attend, device)

        def both(attend: Callable[[], Any] = attend, given: list[Any] = inputs) -> None:
            out = attend()
            torch.autograd.grad(out, given, torch.ones_like(out))

        yield Attended(name, length, heads, size, number, forward, max(forward, _seconds(both, device) - forward))


def _memory(device: Any) -> float:
    """Returns the memory bandwidth in GB/s: an addition of two 64 MiB tensors into a third."""
    import torch

    one, other, out = (torch.ones(16 * _MIB, device=device) for _ in range(3))
    return 3 * one.nbytes / _seconds(lambda: torch.add(one, other, out=out), device) / 1e9


def _launch(device: Any, kernels: int = 500) -> float:
    import torch

    tiny = torch.ones(1, device=device)

    def several() -> None:
        for _ in range(kernels):
            tiny.add_(1.0)

    return _seconds(several, device) / kernels


def _sums(device: Any, backend: str, nodes: int) -> Iterator[Summed]:
    """Yields all-reduces over all ranks and, with several nodes, over the ranks of one node. Each has two sizes, to
    separate latency and bandwidth."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    local = ranks // nodes
    groups = {(ranks, nodes): None}
    if nodes > 1 and local > 1 and ranks % nodes == 0:
        first = dist.get_rank() // local * local
        made = [dist.new_group(range(begin, begin + local)) for begin in range(0, ranks, local)]
        groups[local, 1] = made[first // local]
    for (size, spread), group in groups.items():
        for moved in _SIZES[backend] if size > 1 else ():
            values = torch.ones(moved // 4, device=device)
            seconds = [_synchronized(values, group, device) for _ in range(_REPEATS + 1)][1:]
            yield Summed(size, spread, moved, min(seconds))


def _synchronized(values: Any, group: Any, device: Any) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier(group)
    began = time.perf_counter()
    dist.all_reduce(values, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
