"""The rates of a GPU's kernels and of its links that an estimate of time uses, and the source of each figure."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log2
from typing import Final, Self

from tridock.contracts.calibration import Calibration, Summed
from tridock.errors import Problem, RequestError
from tridock.gpus import Gpu, Network
from tridock.layout.activations import Attention
from tridock.layout.kernels import MEMORY_SHARE, KernelRates, attention_seconds, product_seconds
from tridock.layout.traffic import Link, Traffic, all_reduce
from tridock.plan.correction import Correction
from tridock.plan.spread import Spread, corrected_spread

CPU = "cpu"


def measured_device(calibration: Calibration, precision: str, source: str) -> KernelRates:
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
    device = KernelRates(best, calibration.units, 1.0, 1.0, memory, calibration.launch_s, tiled=tiled)
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


GIVEN: Final = "given"
DEFAULT_LINK_GB_S: Final = 32.0
"""PCIe 4, for a GPU that is not listed."""
DEFAULT_MEMORY_GB_S: Final = 900.0
"""HBM2's, for a GPU that is not listed."""
_LAUNCH_S: Final = 6e-6
"""Time between kernels of eager PyTorch."""
_START_S: Final = 8e-6
"""Start-up and tail of a kernel that follows another: until all units work, from the first to end to the last, and
the gap between kernels."""
_NVLINK_SHARE: Final = 0.8
"""Share of NVLink's rate in a ring: 235 of 300 GB/s on A100, 367 of 450 on H200, 682 of 900 on B200 (Bekman)."""
_PCIE_SHARES: Final = {4: 0.69, 8: 0.42}
"""Share of PCIe's rate in rings of up to this many ranks (SimuMax, ``configs/system/a100_pcie.json``). Beyond 4 a ring
crosses from one half of the node to the other. Groups that all cross share that way: there, two rings of four ranks
reached 7 to 7.65 GB/s, four of two ranks 3.9 to 4, against 13.4 of one with eight (``dp_fixed_bw``)."""
_PCIE_GB_S: Final = 64.0
"""Links up to this rate are PCIe."""
_NETWORK_SHARE: Final = 0.85
"""Share of a network's rate in a ring: 0.91 on four nodes with H200 (Bekman), less on more."""
_LATENCY_S: Final[Mapping[str, float]] = {"node": 50e-6, "network": 110e-6}
"""Time of one collective besides that of its bytes at the full rate: 40 us for 32 KiB to 95 us for 64 MiB on eight
H200, 112 us for 4 MiB on four nodes (Bekman); 66 us on eight B200 (SimuMax)."""
_HOP_S: Final[Mapping[str, float]] = {"node": 3.4e-6, "network": 14e-6}
"""Time of one step of a ring from rank to rank besides that of its bytes (NCCL, ``src/graph/tuning.cc``, Simple)."""
_CHANNELS: Final[Mapping[str, int]] = {"node": 24, "network": 16}
"""Blocks of threads of NCCL's kernels, each of which occupies a unit while it waits for other ranks: 24 over NVSwitch
(log in NVIDIA/nccl-tests, issue 100), 16 over a network (NVIDIA/nccl, issue 652)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that the estimate uses. None: unknown, and then there is no estimate."""

    tflops: float | None
    """Rate of one GPU in large matrix products."""
    tflops_source: str
    link_gb_s: float
    """Between GPUs of a node, one direction, of one GPU."""
    network_gb_s: float
    """Between nodes, one direction, of one node."""
    network_source: str
    memory_gb_s: float
    """Rate of a GPU's own memory."""
    peak_tflops: float | None
    device: KernelRates | None
    """The rates of the GPU's kernels."""
    links: Mapping[Link, tuple[float, float]] = field(default_factory=dict)
    """Measured latency and GB/s."""
    slower: Mapping[Link, float] = field(default_factory=dict)
    """Factors on the time over a link, measured by a run."""
    attention: Attention = "fused"
    overlaps: bool = True
    """Whether engines overlap communication with computation."""
    gpu: Gpu | None = None
    spread: Spread | None = None
    """How far measured times lie from those estimated with these rates."""

    @classmethod
    def of(
        cls,
        gpu: Gpu | None,
        precision: str,
        tflops: float | None,
        network_gbit: float | None,
        tf32: bool = False,
        slots: int = 8,
    ) -> Self:
        """Returns a GPU's rates on nodes of ``slots``; ``tflops``, measured or desired, applies to all products."""
        network, source = network_of(gpu, network_gbit, slots)
        peak = None if gpu is None else gpu.tflops(precision, tf32)
        link = (None if gpu is None else gpu.link_gb_s) or DEFAULT_LINK_GB_S
        memory = (None if gpu is None else gpu.memory_gb_s) or DEFAULT_MEMORY_GB_S
        if tflops is not None:
            flat = KernelRates(tflops, 1, 1.0, 1.0, memory, 0.0, flat=True)
            return cls(tflops, GIVEN, link, network, source, memory, peak, flat, gpu=gpu)
        if gpu is None or peak is None:
            return cls(None, "unknown", link, network, source, memory, peak, None)
        kernels = gpu.kernels
        device = KernelRates(
            peak,
            kernels.units,
            kernels.matmul_share,
            kernels.attention_share,
            memory,
            _LAUNCH_S,
            _START_S,
            flash_2_share=kernels.flash_2_share,
            half_length=kernels.half_length,
        )
        if gpu.tflops_8 is not None and precision != "fp32":
            device = replace(device, fp8=gpu.tflops_8 / peak)
        text = f"assumed: {kernels.matmul_share:.0%} of the peak in large products"
        return cls(kernels.matmul_share * peak, text, link, network, source, memory, peak, device, gpu=gpu)

    def measured(self, calibration: Calibration, precision: str, source: str) -> Self:
        """Returns these rates with the measured ones where available; a given network rate stays."""
        device, links = measured_device(calibration, precision, source), dict(measured_links(calibration))
        text = f"measured: {source}"
        if self.network_source == GIVEN:
            links.pop("network", None)
        network = links.get("network")
        return replace(
            self,
            tflops=device.tflops,
            tflops_source=text,
            network_gb_s=self.network_gb_s if network is None else network[1],
            network_source=self.network_source if network is None else text,
            memory_gb_s=calibration.memory_gb_s,
            device=device if self.device is None else replace(device, fp8=self.device.fp8),
            links=links,
        )

    def corrected(self, by: Correction) -> Self:
        """Returns these rates with kernel and message times multiplied by a run's measured factor."""
        if self.device is None or self.tflops is None:
            return self
        device = replace(
            self.device,
            tflops=self.device.tflops / by.time,
            memory_gb_s=self.device.memory_gb_s / by.time,
            launch_s=self.device.launch_s * by.time,
            start_s=self.device.start_s * by.time,
        )
        known, network = f"measured: {by.source}", self.network_source
        if by.planned_s is not None:
            known = f"{self.tflops_source}; {by.time:.3g} times the time, as {by.source} measured"
        if "network" in by.links:
            network = f"{network}; {by.time:.3g} times the time, as {by.source} measured"
        return replace(
            self,
            tflops=self.tflops / by.time,
            tflops_source=known,
            network_source=network,
            memory_gb_s=self.memory_gb_s / by.time,
            device=device,
            slower=dict.fromkeys(by.links, by.time),
            spread=None if self.spread is None else corrected_spread().scaled(self.spread.typical),
        )

    def seconds(self, one: Traffic) -> float:
        """Returns the time of a group's communication if only groups of its kind use its link."""
        latency = self.links[one.link][0] if one.link in self.links else _LATENCY_S[one.link]
        nodes = -(-one.size // one.together)
        ring = (one.size - nodes) * _HOP_S["node"] + (nodes - 1) * _HOP_S["network"]
        return one.messages * max(latency, ring) * self.slower.get(one.link, 1.0) + self.carried(one, one.waits)

    def occupied(self, one: Traffic) -> float:
        """Returns the share of the device that a group's communication takes from the computation beside it."""
        is_pcie = one.link == "node" and self.link_gb_s <= _PCIE_GB_S  # few channels saturate it
        if self.device is None or self.device.flat or not self.device.tiled or is_pcie:
            return 0.0
        return _CHANNELS[one.link] / self.device.units

    def carried(self, one: Traffic, moved: float) -> float:
        """Returns the time to move a rank's bytes in a group, without the latency of its messages."""
        moved *= self.slower.get(one.link, 1.0)
        if one.link == "network":
            rate = self.links[one.link][1] if one.link in self.links else self.network_gb_s * _NETWORK_SHARE
            return moved * one.sharing / (rate * 1e9)
        if one.link in self.links:
            return moved / (self.links[one.link][1] * 1e9)
        if self.link_gb_s > _PCIE_GB_S:
            of_two = one.size == 2 or one.group == "pipeline"
            share = self.gpu.pair_share if self.gpu is not None and of_two else 1.0
            return moved / (self.link_gb_s * share * _NVLINK_SHARE * 1e9)
        share = next((share for most, share in _PCIE_SHARES.items() if one.span <= most), min(_PCIE_SHARES.values()))
        crossing = one.sharing if one.span > min(_PCIE_SHARES) else 1
        return moved * crossing / (self.link_gb_s * share * 1e9)


def network_of(gpu: Gpu | None, gbit: float | None, slots: int) -> tuple[float, str]:
    """Returns the GB/s of a node of ``slots``, and the source of the figure."""
    if gbit is not None:
        return gbit / 8, GIVEN
    network = Network() if gpu is None else gpu.network
    return network.gbit * slots / 8, f"assumed: {slots} x {network.gbit:g} Gbit/s, as {network.like}"
