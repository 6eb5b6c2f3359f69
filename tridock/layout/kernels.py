"""KernelRates time of a matrix product, of attention, and of a memory-bound kernel. Pure.

A matrix product is cut into tiles, which the units of a device (SMs) process in waves: a partial last wave takes as
long as a full one, and a tile that extends over the edge as long as a whole one (NVIDIA, "Matrix Multiplication
Background User's Guide"). Each tile also takes time to start and to end, as if the inner dimension were longer. The
fastest of several tile sizes counts; smaller tiles reach less of the peak. The constants are fitted to the 183 products
that SimuMax measured on an A100 (``configs/system/a100_pcie.json``), which they reproduce within 4 % on average; the
same constants reproduce its 514 products on a B200 within 13 %.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from tridock.gpus import HALF_LENGTH
from tridock.layout.activations import Attention

_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (256, 64, 0.9), (64, 256, 0.9), (128, 64, 0.72))
"""Rows, columns, and the rate relative to the largest tile."""
_LARGEST: Final = 256 * 128
_TILE_S: Final = 3.5e-6
"""Start and end of the largest tile: the same on A100 and B200."""
_SPLITS: Final = (1, 2, 4)
"""Parts into which the inner dimension is split (split-K) if there are too few tiles."""
_ALIGNED: Final = 64
"""Elements of 2 bytes in 128 bytes: rows of other lengths load more slowly (NVIDIA's guide, section 2.1)."""
_UNALIGNED_SHARE: Final = 0.75
"""Rate of unaligned rows over aligned: 94 TFLOP/s with hidden size 14400 over 8 ranks, 120 with 13824 (bigscience)."""
MEMORY_SHARE: Final = 0.75
"""Share of the memory rate that memory-bound kernels reach; SimuMax's files have 0.91 for A100 and 0.67 for B200."""
_HEADS: Final = (32, 64, 96, 128, 192, 256)
"""Head sizes for which fused attention has kernels; others are padded (FlashAttention-2)."""
_BACKWARD_FLOPS: Final = 2.5
"""FLOPs relative to fused attention's forward pass: five products, as the scores are recomputed (Dao, 2023)."""
_BACKWARD_SHARE: Final = 0.85
"""Rate relative to the forward pass."""
_OLDER: Final[Mapping[Attention, tuple[float, float]]] = {"flash-triton": (1.4, 2.0), "flash-1": (2.0, 2.0)}
"""Time forward and backward relative to FlashAttention-2: 1.3 to 1.5 and about 2 of FlashAttention in Triton, about 2
of FlashAttention (Dao, 2023, section 4.1)."""
_ROWS: Final = 128
"""Rows of the scores that one unit processes at a time."""


@dataclass(frozen=True, slots=True)
class KernelRates:
    """The rates that one device's kernels reach."""

    tflops: float
    """Peak of its matrix products in the run's format."""
    units: int
    """Units (SMs) that process one tile each."""
    matmul_share: float
    attention_share: float
    memory_gb_s: float
    launch_s: float
    """Minimum time from one kernel to the next: the host's launch time."""
    start_s: float = 0.0
    """Start-up and tail of each kernel: until all units work, and from the first idle unit to the last."""
    fp8: float = 1.0
    """Rate of products in fp8, relative to ``tflops``."""
    flat: bool = False
    """The rate holds for products of every shape, because it was given."""
    tiled: bool = True
    """Products are processed in waves of tiles, as on GPUs."""
    attention_backward: float = _BACKWARD_FLOPS / _BACKWARD_SHARE
    """Time of attention's backward pass relative to its forward pass."""
    flash_2_share: float | None = None
    """Share of FlashAttention-2, where it is not the fastest."""
    half_length: int = HALF_LENGTH
    """Sequence length at which attention reaches half of its share."""
    points: tuple[tuple[float, float, float, float], ...] = ()
    """Measured products: log2 of rows, columns and inner dimension, and the measured time over the estimated time."""


@lru_cache(maxsize=16384)
def product_seconds(device: KernelRates, rows: int, columns: int, inner: int, size: int = 2) -> float:
    """Returns the time of a product of [rows, inner] and [inner, columns], in numbers of ``size`` bytes."""
    flops = 2.0 * rows * columns * inner
    rate = device.tflops * 1e12 * device.matmul_share
    if device.flat:
        return flops / rate
    factor = _factor(device, rows, columns, inner)
    moved = size * (rows * inner + inner * columns + rows * columns) / (device.memory_gb_s * MEMORY_SHARE * 1e9)
    if not device.tiled:
        return factor * max(moved, flops / rate)
    if any(length % _ALIGNED for length in (columns, inner)):
        rate *= _UNALIGNED_SHARE
    return factor * max(moved, _tiled_seconds(device, rows, columns, inner, rate))


def _factor(device: KernelRates, rows: int, columns: int, inner: int) -> float:
    """Returns measured over estimated time: the mean over the measured products, weighted by distance in doublings."""
    if not device.points:
        return 1.0
    at = math.log2(rows), math.log2(columns), math.log2(inner)
    weights = [1.0 / (0.1 + math.dist(at, point[:3]) ** 2) for point in device.points]
    logs = [weight * math.log(point[3]) for weight, point in zip(weights, device.points, strict=True)]
    return math.exp(sum(logs) / sum(weights))


def _tiled_seconds(device: KernelRates, rows: int, columns: int, inner: int, rate: float) -> float:
    best = math.inf
    for tall, wide, share in _TILES:
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide)
        tile_rate = rate / device.units * share
        for parts in _SPLITS if tiles < 2 * device.units else _SPLITS[:1]:
            waves = math.ceil(tiles * parts / device.units)
            one = 2.0 * tall * wide * math.ceil(inner / parts) / tile_rate + _TILE_S * tall * wide / _LARGEST
            added = 8.0 * parts * rows * columns / (device.memory_gb_s * 1e9) if parts > 1 else 0.0
            best = min(best, waves * one + added)
    return best


def attention_seconds(
    device: KernelRates, length: int, heads: float, head_size: int, samples: float, kernel: Attention = "fused"
) -> tuple[float, float]:
    """Returns the forward and backward time of fused causal attention over ``samples`` sequences of ``length``."""
    padded = next((size for size in _HEADS if size >= head_size), head_size)
    flops = 2.0 * length * length * heads * padded * samples
    if device.flat:  # consistent with the experiment's FLOPs, which count attention to all tokens
        forward = 2.0 * flops * head_size / padded / (device.tflops * 1e12 * device.matmul_share)
        return forward, 2.0 * forward
    blocks = max(1.0, samples * heads * length / _ROWS)
    filled = blocks / (math.ceil(blocks / device.units) * device.units) if device.tiled else 1.0
    # Small heads spend a larger share of the time on softmax.
    most = device.attention_share if kernel == "fused" else device.flash_2_share or device.attention_share
    share = most * filled * min(1.0, 0.7 + 0.3 * padded / 128) * length / (length + device.half_length)
    forward, (slower, slower_back) = flops / (device.tflops * 1e12 * share), _OLDER.get(kernel, (1.0, 1.0))
    return forward * slower, forward * device.attention_backward * slower_back


def pass_seconds(device: KernelRates, moved: float) -> float:
    """Returns the time of a memory-bound kernel that reads and writes ``moved`` bytes in all."""
    return moved / (device.memory_gb_s * MEMORY_SHARE * 1e9)
