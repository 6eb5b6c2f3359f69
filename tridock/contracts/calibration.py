"""What ``tridock calibrate`` measures on a device and between devices, and the planner's estimates use."""

from dataclasses import dataclass
from typing import Final

SUFFIX: Final = ".calibration.json"
"""After a hostfile's name, for the calibration of its cluster."""


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
    """Of one device while all ranks of the calibration were busy; and of the ranks together."""

    device: str
    """As the driver names a GPU; ``cpu``."""
    ranks: int
    units: int
    """Streaming multiprocessors, or threads of a CPU rank."""
    memory_gb_s: float
    """Read and written by an addition of large tensors."""
    launch_s: float
    """From one kernel to the next."""
    products: tuple[Product, ...]
    attention: tuple[Attended, ...]
    sums: tuple[Summed, ...]
