"""How long a device takes for a matrix product, for attention, and for a pass over its memory. Pure.

A matrix product is cut into tiles, which the units of a device work off in waves: a last wave that is not full takes as
long as a full one, and a tile that reaches over the edge as long as a whole one (NVIDIA, "Matrix Multiplication
Background User's Guide"). Each tile also takes a while to start and to end, as if the inner dimension were longer. Of
several tile sizes the fastest counts; smaller ones reach less of the peak. The constants are fitted to the 183 products
that SimuMax measured on an A100 (``configs/system/a100_pcie.json``), which they give within 4 % on average; the same
constants give its 514 products on a B200 within 13 %.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (256, 64, 0.9), (64, 256, 0.9), (128, 64, 0.72))
"""Rows, columns, and the share of what a device reaches with the largest."""
_LARGEST: Final = 256 * 128
_TILE_S: Final = 3.5e-6
"""What the largest tile's start and end take: the same on A100 and B200."""
_SPLITS: Final = (1, 2, 4)
"""Parts of the inner dimension that are worked on at a time, where there are too few tiles."""
_ALIGNED: Final = 64
"""Elements of 2 bytes in 128 bytes: rows of other lengths load more slowly (NVIDIA's guide, section 2.1)."""
_UNALIGNED_SHARE: Final = 0.75
"""Of the rate of others: 94 TFLOP/s with hidden size 14400 over 8 ranks, 120 with 13824 (bigscience, chronicles)."""
MEMORY_SHARE: Final = 0.75
"""Of a device's memory rate, in kernels that do little else; SimuMax's files have 0.91 for A100 and 0.67 for B200."""
_HEADS: Final = (32, 64, 96, 128, 192, 256)
"""Sizes of a head that fused attention has kernels for; others are padded (FlashAttention-2)."""
_BACKWARD_FLOPS: Final = 2.5
"""Of fused attention's forward pass: five products, as the scores are computed again (Dao, 2023)."""
_BACKWARD_SHARE: Final = 0.85
"""Of the rate of its forward pass."""
_ROWS: Final = 128
"""Rows of the scores that one unit works on at a time."""
_HALF_LENGTH: Final = 512
"""Tokens of a sequence with which causal attention reaches half of its share: blocks on the diagonal are half in vain,
and short rows spend more time at their start (Dao, 2023, figure 5)."""


@dataclass(frozen=True, slots=True)
class Device:
    """What the kernels of one device reach."""

    tflops: float
    """The peak of its matrix products in the format of the run."""
    units: int
    """That work on a tile each."""
    matmul_share: float
    attention_share: float
    memory_gb_s: float
    launch_s: float
    """From one kernel to the next, at least: what the host takes to start it."""
    start_s: float = 0.0
    """Of each kernel, until all units work and after the first have nothing left to do."""
    flat: bool = False
    """The rate holds for products of every shape: it was given."""
    tiled: bool = True
    """Products are worked off in waves of tiles, as on GPUs."""
    attention_backward: float = _BACKWARD_FLOPS / _BACKWARD_SHARE
    """Time of attention's backward pass over that of its forward pass."""
    points: tuple[tuple[float, float, float, float], ...] = ()
    """Products that were measured: log2 of rows, columns and inner dimension, and their time over the estimated one."""


@lru_cache(maxsize=16384)
def product_seconds(device: Device, rows: int, columns: int, inner: int, size: int = 2) -> float:
    """A product of [rows, inner] and [inner, columns], of numbers of ``size`` bytes."""
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


def _factor(device: Device, rows: int, columns: int, inner: int) -> float:
    """What was measured over the estimate: the mean of the measured products, by their distance in doublings."""
    if not device.points:
        return 1.0
    at = math.log2(rows), math.log2(columns), math.log2(inner)
    weights = [1.0 / (0.1 + math.dist(at, point[:3]) ** 2) for point in device.points]
    logs = [weight * math.log(point[3]) for weight, point in zip(weights, device.points, strict=True)]
    return math.exp(sum(logs) / sum(weights))


def _tiled_seconds(device: Device, rows: int, columns: int, inner: int, rate: float) -> float:
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


def attention_seconds(device: Device, length: int, heads: float, head_size: int, samples: float) -> tuple[float, float]:
    """Forward and backward pass of fused causal attention over ``samples`` sequences of ``length``."""
    padded = next((size for size in _HEADS if size >= head_size), head_size)
    flops = 2.0 * length * length * heads * padded * samples
    if device.flat:  # as the FLOPs of the experiment are counted: as if each token attended to all
        forward = 2.0 * flops * head_size / padded / (device.tflops * 1e12 * device.matmul_share)
        return forward, 2.0 * forward
    blocks = max(1.0, samples * heads * length / _ROWS)
    filled = blocks / (math.ceil(blocks / device.units) * device.units) if device.tiled else 1.0
    # Small heads spend more of their time on the softmax.
    share = device.attention_share * filled * min(1.0, 0.7 + 0.3 * padded / 128) * length / (length + _HALF_LENGTH)
    forward = flops / (device.tflops * 1e12 * share)
    return forward, forward * device.attention_backward


def pass_seconds(device: Device, moved: float) -> float:
    """A kernel that does little but to read and write so many bytes in all."""
    return moved / (device.memory_gb_s * MEMORY_SHARE * 1e9)
