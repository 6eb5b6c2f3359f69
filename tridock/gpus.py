"""GPUs by name: memory size, peak compute, memory and link bandwidth. From NVIDIA's and AMD's data sheets.

Memory is what ``nvidia-smi`` shows as the total; rates are dense (without sparsity), decimal, one direction.

Shares of the peak are measured. ``matmul_share``: A100 0.78 over 183 shapes on PCIe (SimuMax, ``configs/system``); the
best shape there reaches 0.81, on SXM the best reaches 0.87 (Bekman, Machine Learning Engineering, "Maximum Achievable
Matmul FLOPS"), so 0.84. Blackwell's in the same way: 0.54 over SimuMax's 514 shapes, of which the best reaches 0.655;
the best reaches 0.776 on Bekman's B200, 0.729 on GB200, 0.786 on B300, so 0.64, 0.60 and 0.65. Of H100 and H200 only
the best shape is known, 0.80 (Bekman): A100's share is 0.97 of its best, B200's 0.83, so 0.72 in between.
``attention_share``: of causal attention, half of its FLOPs counted, heads of 128 (SimuMax for A100 and B200; Dao,
FlashAttention-2, 2023, for A100; Shah et al., FlashAttention-3, 2024, figure 5, for H100: cuDNN's reaches 315, 484 and
539 TFLOP/s with 512, 2,048 and 16,384 tokens, FlashAttention-2 191, 298 and 335). Others take the share of their
architecture. Networks are those of NVIDIA's DGX systems. ``host_gb_s``: CUDA's bandwidthTest, 11 over PCIe 3 (V100;
router-gao/cuda-demo), 26 over PCIe 4 (A100; jdh4/della-gpu-A100), 52 to 55 over PCIe 5 (H100). AMD's best shapes reach
0.6 of the peak (Bekman, MI300X); its typical one, and GB10's peak, a quarter of its fp4 rate, are assumed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tridock.errors import Problem, RequestError, cut

MIB: Final = 2**20
HALF_LENGTH: Final = 512
"""Sequence length at which causal attention reaches half of its share: half of the work in diagonal blocks is wasted,
and short rows spend more of their time starting (Dao, 2023, figure 5)."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The share of a GPU's peak that its kernels reach, and the bandwidth of its link to the host."""

    units: int
    """Streaming multiprocessors; each computes one tile of a matrix product at a time."""
    matmul_share: float
    """Share of the peak that a matrix product reaches when it keeps all units busy."""
    attention_share: float
    """Share of the peak that the forward pass of fused causal attention reaches, with half of its FLOPs counted."""
    host_gb_s: float = 26.0
    """GB/s from the GPU to page-locked memory of its host."""
    flash_2_share: float | None = None
    """The same of FlashAttention-2, if newer kernels are faster."""
    half_length: int = HALF_LENGTH
    """Sequence length at which attention reaches half of its share."""


@dataclass(frozen=True, slots=True)
class Network:
    """The network that a node with this GPU usually has."""

    gbit: float = 25.0
    """Per GPU of the node, in one direction."""
    like: str = "100 Gbit/s for 4 GPUs"


_VOLTA: Final = Kernels(80, 0.75, 0.32, 11.0)
_TURING: Final = Kernels(40, 0.70, 0.28, 11.0)
_AMPERE: Final = Kernels(84, 0.78, 0.55)
_A100: Final = Kernels(108, 0.84, 0.64)
_A100_PCIE: Final = Kernels(108, 0.78, 0.64)
_ADA: Final = Kernels(128, 0.75, 0.50)
_HOPPER: Final = Kernels(132, 0.72, 0.55, 52.0, flash_2_share=0.345, half_length=370)
_H20: Final = Kernels(78, 0.90, 0.64, 52.0)
"""Its best shape reaches 0.96 of the peak, 8,192 cubed 0.94, 4,096 cubed 0.90 (zzc0721/torch-performance-test-data)."""
_BLACKWELL_RTX: Final = Kernels(170, 0.75, 0.50, 52.0)
_GB10: Final = Kernels(48, 0.65, 0.50, 52.0)
_CDNA: Final = Kernels(304, 0.50, 0.35, 52.0)
_B200: Final = Kernels(148, 0.64, 0.50, 52.0)
_B300: Final = Kernels(148, 0.65, 0.50, 52.0)
_GB200: Final = Kernels(152, 0.60, 0.50, 52.0)
_DGX_A100: Final = Network(200.0, "DGX A100")
_DGX_H100: Final = Network(400.0, "DGX H100")
_DGX_B300: Final = Network(800.0, "DGX B300")
_GB200_NVL72: Final = Network(400.0, "DGX GB200")
_GB300_NVL72: Final = Network(800.0, "DGX GB300")


_NVSWITCH_GB_S: Final = 450.0
"""Hopper's rate through NVSwitch; bridges between two GPUs have less."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. A field of None is an unknown figure."""

    name: str
    memory_mib: int
    """Total memory as ``nvidia-smi`` shows it."""
    tflops_16: float | None = None
    """Dense TFLOP/s of fp16 and, if supported, bf16 matrix products, accumulated in fp32."""
    tflops_32: float | None = None
    """TFLOP/s of fp32, without TF32."""
    memory_gb_s: float | None = None
    """Bandwidth of its own memory in GB/s, reading or writing."""
    link_gb_s: float | None = None
    """Bandwidth to the other GPUs of its node in GB/s, one direction: NVLink, or PCIe on GPUs without NVLink."""
    tflops_8: float | None = None
    """Dense TFLOP/s of fp8 matrix products, accumulated in fp32; None below compute capability 8.9, without fp8."""
    bf16: bool = True
    """Supported from compute capability 8.0."""
    kernels: Kernels = _AMPERE
    network: Network = Network()
    watts: float | None = None
    """Power limit of the GPU module, without its host."""
    device: str = ""
    """A part of the driver's name for it. GPUs with the same name differ in memory."""
    is_amd: bool = False
    """Planned only: Tridock's image has CUDA, not ROCm."""
    domain: int | None = None
    """GPUs that one NVLink switch connects beyond their node: 64 of an NVL72's, as NVIDIA's recipes use them
    (dgxc-benchmarking), because groups are powers of two."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def stepwise_norms(self) -> bool:
        """Whether the torch of its base image, 2.6 for V100, has no kernel for RMSNorm."""
        return self.kernels is _VOLTA

    @property
    def pair_share(self) -> float:
        """Share of the bandwidth to other GPUs of the node that one of them can have. A V100 has six NVLinks without a
        switch, at most two of them to the same GPU (NVIDIA, DGX-1 system architecture)."""
        return 1 / 3 if self.kernels is _VOLTA else 1.0

    @property
    def has_multicast(self) -> bool:
        """Whether one write reaches all GPUs of a node: from Hopper on, through NVSwitch."""
        return self.tflops_8 is not None and not self.is_amd and (self.link_gb_s or 0) >= _NVSWITCH_GB_S

    def tflops(self, precision: str, tf32: bool = False) -> float | None:
        """Peak TFLOP/s in ``fp32``, ``bf16`` or ``fp16``. TF32, if supported, is half as fast as bf16."""
        if precision != "fp32":
            return self.tflops_16
        return self.tflops_16 / 2 if tf32 and self.bf16 and self.tflops_16 else self.tflops_32


# More specific names come first, because `of_device` takes the first match.
_TABLE: Final = (
    Gpu("gb300", 284208, 2500.0, 80.0, 8000.0, 900.0, 5000.0,
        kernels=_GB200, network=_GB300_NVL72, watts=1400, device="GB300", domain=64),
    Gpu("gb200", 189471, 2500.0, 80.0, 8000.0, 900.0, 5000.0,
        kernels=_GB200, network=_GB200_NVL72, watts=1200, device="GB200", domain=64),
    Gpu("b300", 275040, 2250.0, 75.0, 8000.0, 900.0, 4500.0,
        kernels=_B300, network=_DGX_B300, watts=1100, device="B300"),
    Gpu("b200", 183359, 2250.0, 75.0, 8000.0, 900.0, 4500.0,
        kernels=_B200, network=_DGX_H100, watts=1000, device="B200"),
    Gpu("h200-nvl", 143771, 835.0, 60.0, 4800.0, 450.0, 1670.5, kernels=_HOPPER, watts=600, device="H200 NVL"),
    Gpu("h200", 143771, 989.4, 66.9, 4800.0, 450.0, 1978.9,
        kernels=_HOPPER, network=_DGX_H100, watts=700, device="H200"),
    Gpu("gh200-96gb", 97871, 989.4, 66.9, 4000.0, 450.0, 1978.9, kernels=_HOPPER, network=_DGX_H100, device="GH200"),
    Gpu("gh200-144gb", 146831, 989.4, 66.9, 4900.0, 450.0, 1978.9, kernels=_HOPPER, network=_DGX_H100, device="GH200"),
    Gpu("h800", 81559, 989.4, 66.9, 3350.0, 200.0, 1978.9,
        kernels=_HOPPER, network=_DGX_H100, watts=700, device="H800"),
    Gpu("h20-96gb", 97871, 148.0, 44.0, 4000.0, 450.0, 296.0,
        kernels=_H20, network=_DGX_H100, watts=500, device="H20"),
    Gpu("h20-141gb", 143771, 148.0, 44.0, 4800.0, 450.0, 296.0,
        kernels=_H20, network=_DGX_H100, watts=500, device="H20"),
    Gpu("h100-pcie", 81559, 756.0, 51.2, 2000.0, 64.0, 1513.0, kernels=_HOPPER, watts=350, device="H100 PCIe"),
    Gpu("h100-nvl", 95830, 835.0, 60.0, 3900.0, 300.0, 1670.5, kernels=_HOPPER, watts=400, device="H100 NVL"),
    Gpu("h100-80gb", 81559, 989.4, 66.9, 3350.0, 450.0, 1978.9,
        kernels=_HOPPER, network=_DGX_H100, watts=700, device="H100"),
    Gpu("a100-pcie", 81920, 312.0, 19.5, 1935.0, 32.0, kernels=_A100_PCIE, watts=300, device="A100 80GB PCIe"),
    Gpu("a100-pcie-40gb", 40960, 312.0, 19.5, 1555.0, 32.0, kernels=_A100_PCIE, watts=250, device="A100-PCIE-40GB"),
    Gpu("a800", 81920, 312.0, 19.5, 2039.0, 200.0, kernels=_A100, network=_DGX_A100, watts=400, device="A800"),
    Gpu("a100-40gb", 40960, 312.0, 19.5, 1555.0, 300.0, kernels=_A100, network=_DGX_A100, watts=400, device="A100"),
    Gpu("a100-80gb", 81920, 312.0, 19.5, 2039.0, 300.0, kernels=_A100, network=_DGX_A100, watts=400, device="A100"),
    Gpu("a6000", 49140, 154.8, 38.7, 768.0, 32.0, kernels=_AMPERE, watts=300, device="RTX A6000"),
    Gpu("a40", 46068, 149.7, 37.4, 696.0, 32.0, kernels=_AMPERE, watts=300, device="A40"),
    Gpu("a10g", 23028, 70.0, 35.0, 600.0, 32.0, kernels=_AMPERE, watts=300, device="A10G"),
    Gpu("a10", 23028, 125.0, 31.2, 600.0, 32.0, kernels=_AMPERE, watts=150, device="A10"),
    Gpu("l40s", 46068, 362.0, 91.6, 864.0, 32.0, 733.0, kernels=_ADA, watts=350, device="L40S"),
    Gpu("l40", 46068, 181.0, 90.5, 864.0, 32.0, 362.1, kernels=_ADA, watts=300, device="L40"),
    Gpu("l20", 46068, 119.5, 59.8, 864.0, 32.0, 239.0, kernels=_ADA, watts=275, device="L20"),
    Gpu("l4", 23034, 121.0, 30.3, 300.0, 32.0, 242.5, kernels=_ADA, watts=72, device="L4"),
    Gpu("rtx-pro-6000", 97887, 503.8, 126.0, 1792.0, 64.0, 1007.6,
        kernels=_BLACKWELL_RTX, watts=600, device="RTX PRO 6000"),
    Gpu("rtx-6000-ada", 49140, 364.2, 91.1, 960.0, 32.0, 728.5, kernels=_ADA, watts=300, device="RTX 6000 Ada"),
    Gpu("rtx-5090", 32607, 209.5, 104.8, 1792.0, 64.0, 419.0, kernels=_BLACKWELL_RTX, watts=575, device="RTX 5090"),
    Gpu("rtx-4090", 24564, 165.2, 82.6, 1008.0, 32.0, 330.3, kernels=_ADA, watts=450, device="RTX 4090"),
    Gpu("rtx-3090", 24576, 71.0, 35.6, 936.0, 32.0, kernels=_AMPERE, watts=350, device="RTX 3090"),
    Gpu("v100-16gb", 16160, 125.0, 15.7, 900.0, 150.0, bf16=False, kernels=_VOLTA, watts=300, device="V100"),
    Gpu("v100-32gb", 32510, 125.0, 15.7, 900.0, 150.0, bf16=False, kernels=_VOLTA, watts=300, device="V100"),
    Gpu("t4", 15360, 65.0, 8.1, 320.0, 16.0, bf16=False, kernels=_TURING, watts=70, device="T4"),
    Gpu("gb10", 122570, 125.0, 31.0, 273.0, 32.0, 250.0,
        kernels=_GB10, network=Network(200.0, "two DGX Sparks"), watts=140, device="GB10"),
    Gpu("mi355x", 294896, 2516.6, 157.3, 8000.0, 537.6, 5033.2,
        kernels=replace(_CDNA, units=256), network=_DGX_H100, watts=1400, device="MI355X", is_amd=True),
    Gpu("mi325x", 262128, 1307.4, 163.4, 6000.0, 448.0, 2614.9,
        kernels=_CDNA, network=_DGX_H100, watts=1000, device="MI325X", is_amd=True),
    Gpu("mi300x", 196592, 1307.4, 163.4, 5300.0, 448.0, 2614.9,
        kernels=_CDNA, network=_DGX_H100, watts=750, device="MI300X", is_amd=True),
)  # fmt: skip
GPUS: Final = {gpu.name: gpu for gpu in _TABLE}
_GRACE_MEMORY: Final = re.compile(r"\b480gb\b")
"""The memory of a GH200's processor, by which its driver names the one with 96 GB."""
_MIG: Final = re.compile(r"\b[0-9]+g\.[0-9]+gb")
_SIZE: Final = re.compile(r"\b([0-9]+)gi?b?\b")
_MEMORY_ONLY: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,6})?)gib")


def find_gpu(name: str, where: str) -> Gpu:
    """Returns the GPU of this name: Tridock's, its driver's, or Slurm's (``nvidia_h100_80gb_hbm3``).

    ``24gib`` is a GPU with only its memory known. Raises :class:`RequestError`, also if several have the name.
    """
    lower = name.lower()
    if (match := _MEMORY_ONLY.fullmatch(lower)) and (memory_mib := round(float(match[1]) * 1024)):
        return Gpu(lower, memory_mib)
    if (gpu := GPUS.get(lower)) is not None:
        return gpu
    found = _of_name(lower)
    if len(found) > 1:
        todo = f"say which: {' or '.join(gpu.name for gpu in found)}"
        raise RequestError(Problem(where, "is the name of several GPUs", repr(cut(name, 80)), todo))
    if not found:
        todo = f"use one of {', '.join(sorted(GPUS))}, or its memory alone, as in 24gib"
        raise RequestError(Problem(where, "is not a known GPU", repr(cut(name, 80)), todo))
    return found[0]


def _of_name(name: str) -> list[Gpu]:
    """Returns the GPUs that a lower-case name may mean, of the size in it; none for a part of a GPU."""
    name = _GRACE_MEMORY.sub("96gb", name.replace("_", " "))
    size = _SIZE.search(name)
    fitting = [] if _MIG.search(name) else _with_name(name)
    # A size is rounded, and part of it is the driver's.
    return [gpu for gpu in fitting if size is None or 0.93 < gpu.memory_mib / 1024 / int(size[1]) < 1.04]


def _with_name(name: str) -> list[Gpu]:
    fitting = [gpu for gpu in _TABLE if re.search(rf"\b{gpu.device}\b", name, re.IGNORECASE)]
    return [gpu for gpu in fitting if gpu.device == fitting[0].device]


def least_of(gpus: Sequence[Gpu]) -> Gpu | None:
    """Returns what every one of these GPUs has at least: the least memory and the least of each rate, if all are known.

    It has the name of the one with the least memory. None without any.
    """
    if not gpus:
        return None
    smallest = min(gpus, key=lambda gpu: gpu.memory_mib)

    def least(rate: str) -> Any:
        known = [getattr(gpu, rate) for gpu in gpus]
        return None if None in known else min(known)

    slowest = min(gpus, key=lambda gpu: (gpu.tflops_16 or 0.0) * gpu.kernels.matmul_share)
    narrowest = min(gpus, key=lambda gpu: gpu.network.gbit)
    return replace(
        smallest,
        **{rate: least(rate) for rate in ("tflops_16", "tflops_32", "tflops_8", "memory_gb_s", "link_gb_s")},
        bf16=all(gpu.bf16 for gpu in gpus),
        kernels=slowest.kernels,
        network=narrowest.network,
        domain=least("domain"),
    )


def of_device(device: str, memory_mib: int | None = None) -> Gpu | None:
    """Returns the GPU for a driver's name such as ``Tesla V100-SXM2-16GB``; ``memory_mib`` decides between variants.

    Returns None for a GPU that is not listed.
    """
    fitting = _with_name(device)
    if memory_mib is None or not fitting:
        return fitting[0] if fitting else None
    return min(fitting, key=lambda gpu: abs(gpu.memory_mib - memory_mib))
