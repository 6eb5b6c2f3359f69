"""The rates of a device and its links, from the measurements of ``tridock calibrate``."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from math import log2

from tridock.contracts.calibration import Calibration, Summed
from tridock.errors import Problem, RequestError
from tridock.layout.kernels import MEMORY_SHARE, Device, attention_seconds, product_seconds
from tridock.layout.traffic import Link, all_reduce

CPU = "cpu"


def measured_device(calibration: Calibration, precision: str, source: str) -> Device:
    """Returns the measured device. Raises :class:`RequestError` for a format that was not measured."""
    products = [one for one in calibration.products if one.precision == precision]
    attention = [one for one in calibration.attention if one.precision == precision]
    if not products or not attention:
        known = sorted({one.precision for one in calibration.products})
        todo = f"use {' or '.join(known)}, or --tflops" if known else "measure again with tridock calibrate"
        raise RequestError(Problem(source, "has no measurements in this precision", precision, todo))
    size = 4 if precision == "fp32" else 2
    best = max(2.0 * one.rows * one.columns * one.inner / one.seconds for one in products) / 1e12
    memory = calibration.memory_gb_s / MEMORY_SHARE
    tiled = calibration.device != CPU
    device = Device(best, calibration.units, 1.0, 1.0, memory, calibration.launch_s, tiled=tiled)
    points = tuple(
        (log2(one.rows), log2(one.columns), log2(one.inner),
         one.seconds / product_seconds(device, one.rows, one.columns, one.inner, size))
        for one in products
    )  # fmt: skip
    shares, backward = [], []
    for one in attention:
        forward = attention_seconds(device, one.length, one.heads, one.head_size, one.samples)[0]
        shares.append(forward / one.forward_s)
        backward.append(one.backward_s / one.forward_s)
    return replace(
        device,
        attention_share=statistics.geometric_mean(shares),
        attention_backward=statistics.geometric_mean(backward),
        points=points,
    )


def measured_links(calibration: Calibration) -> Mapping[Link, tuple[float, float]]:
    """Returns message latency and GB/s of one rank, within a node and between nodes, for the measured links."""
    found: dict[Link, tuple[float, float]] = {}
    for nodes in {one.nodes for one in calibration.sums}:
        few, many = _ends([one for one in calibration.sums if one.nodes == nodes])
        moved = all_reduce(many.ranks, many.bytes) - all_reduce(few.ranks, few.bytes)
        took = max(many.seconds - few.seconds, 1e-9)
        latency = max(0.0, few.seconds - all_reduce(few.ranks, few.bytes) / moved * took)
        found["node" if nodes == 1 else "network"] = latency, moved / took / 1e9
    return found


def _ends(sums: list[Summed]) -> tuple[Summed, Summed]:
    ordered = sorted(sums, key=lambda one: one.bytes)
    return ordered[0], ordered[-1]
