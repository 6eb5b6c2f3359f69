"""Measurements of ``tridock calibrate`` on and between devices, which the planner's estimates use."""

from dataclasses import dataclass
from typing import Final

from tridock.contracts.codec import JSON_VERSION

SUFFIX: Final = ".calibration.json"
"""Suffix of a hostfile's name that gives its cluster's calibration file."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of [rows, inner] and [inner, columns]."""

    precision: str
    rows: int
    columns: int
    inner: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Attended:
    """Fused causal attention over ``samples`` sequences."""

    precision: str
    length: int
    heads: int
    head_size: int
    samples: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Summed:
    """An all-reduce."""

    ranks: int
    nodes: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of one device while all ranks were busy, and of the ranks together."""

    device: str
    """The driver's name for the GPU, or ``cpu``."""
    ranks: int
    units: int
    """Streaming multiprocessors of the GPU, or threads of a CPU rank."""
    memory_gb_s: float
    """Memory bandwidth, reads and writes together, during an addition of large tensors."""
    launch_s: float
    """Time from the start of one kernel to the next."""
    products: tuple[Product, ...]
    attention: tuple[Attended, ...]
    sums: tuple[Summed, ...]
    version: int = JSON_VERSION
