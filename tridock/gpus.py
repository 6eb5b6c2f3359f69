"""GPUs by name: memory size, peak compute, memory and link bandwidth. From NVIDIA's data sheets.

Memory is what ``nvidia-smi`` shows as the total; rates are dense (without sparsity), decimal, one direction.

Shares of the peak are measured. ``matmul_share``: A100 0.78 over 183 shapes on PCIe (SimuMax, ``configs/system``); the
best shape there reaches 0.81, on SXM the best reaches 0.87 (Bekman, Machine Learning Engineering, "Maximum Achievable
Matmul FLOPS"), so 0.84. Blackwell's in the same way: 0.54 over SimuMax's 514 shapes, of which the best reaches 0.655;
the best reaches 0.776 on Bekman's B200, 0.729 on GB200, 0.786 on B300, so 0.64, 0.60 and 0.65. H100 and H200 0.68, set
with MosaicML's MPT on one node: the best shape reaches 0.80 there, and their clock falls under long products.
``attention_share``: of causal attention, half of its FLOPs counted, heads of 128 (SimuMax for A100 and B200; Dao,
FlashAttention-2, 2023, for A100; Shah et al., FlashAttention-3, 2024, figure 5, for H100: cuDNN's reaches 315, 484 and
539 TFLOP/s with 512, 2,048 and 16,384 tokens, FlashAttention-2 191, 298 and 335). Others take the share of their
architecture. Networks are those of NVIDIA's DGX systems. ``host_gb_s``: CUDA's bandwidthTest, 11 over PCIe 3 (V100;
router-gao/cuda-demo), 26 over PCIe 4 (A100; jdh4/della-gpu-A100), 52 to 55 over PCIe 5 (H100).
"""

import re
from dataclasses import dataclass
from typing import Final

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
_HOPPER: Final = Kernels(132, 0.68, 0.55, 52.0, flash_2_share=0.345, half_length=370)
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
        return self.tflops_8 is not None and (self.link_gb_s or 0) >= _NVSWITCH_GB_S

    def tflops(self, precision: str, tf32: bool = False) -> float | None:
        """Peak TFLOP/s in ``fp32``, ``bf16`` or ``fp16``. TF32, if supported, is half as fast as bf16."""
        if precision != "fp32":
            return self.tflops_16
        return self.tflops_16 / 2 if tf32 and self.bf16 and self.tflops_16 else self.tflops_32


# More specific names come first, because `of_device` takes the first match.
_TABLE: Final = (
    Gpu(
        "gb300",
        284208,
        2500.0,
        80.0,
        8000.0,
        900.0,
        5000.0,
        kernels=_GB200,
        network=_GB300_NVL72,
        watts=1400,
        device="GB300",
        domain=64,
    ),
    Gpu(
        "gb200",
        189471,
        2500.0,
        80.0,
        8000.0,
        900.0,
        5000.0,
        kernels=_GB200,
        network=_GB200_NVL72,
        watts=1200,
        device="GB200",
        domain=64,
    ),
    Gpu(
        "b300",
        275040,
        2250.0,
        75.0,
        8000.0,
        900.0,
        4500.0,
        kernels=_B300,
        network=_DGX_B300,
        watts=1100,
        device="B300",
    ),
    Gpu(
        "b200",
        183359,
        2250.0,
        75.0,
        8000.0,
        900.0,
        4500.0,
        kernels=_B200,
        network=_DGX_H100,
        watts=1000,
        device="B200",
    ),
    Gpu(
        "h200", 143771, 989.4, 66.9, 4800.0, 450.0, 1978.9, kernels=_HOPPER, network=_DGX_H100, watts=700, device="H200"
    ),
    Gpu("gh200-96gb", 97871, 989.4, 66.9, 4000.0, 450.0, 1978.9, kernels=_HOPPER, network=_DGX_H100, device="GH200"),
    Gpu("h100-pcie", 81559, 756.0, 51.2, 2000.0, 64.0, 1513.0, kernels=_HOPPER, watts=350, device="H100 PCIe"),
    Gpu("h100-nvl", 95830, 835.0, 60.0, 3900.0, 300.0, 1670.5, kernels=_HOPPER, watts=400, device="H100 NVL"),
    Gpu(
        "h100-80gb",
        81559,
        989.4,
        66.9,
        3350.0,
        450.0,
        1978.9,
        kernels=_HOPPER,
        network=_DGX_H100,
        watts=700,
        device="H100",
    ),
    Gpu("a100-pcie", 81920, 312.0, 19.5, 1935.0, 32.0, kernels=_A100_PCIE, watts=300, device="A100 80GB PCIe"),
    Gpu("a100-40gb", 40960, 312.0, 19.5, 1555.0, 300.0, kernels=_A100, network=_DGX_A100, watts=400, device="A100"),
    Gpu("a100-80gb", 81920, 312.0, 19.5, 2039.0, 300.0, kernels=_A100, network=_DGX_A100, watts=400, device="A100"),
    Gpu("a6000", 49140, 154.8, 38.7, 768.0, 32.0, kernels=_AMPERE, watts=300, device="RTX A6000"),
    Gpu("a10", 23028, 125.0, 31.2, 600.0, 32.0, kernels=_AMPERE, watts=150, device="A10"),
    Gpu("l40s", 46068, 362.0, 91.6, 864.0, 32.0, 733.0, kernels=_ADA, watts=350, device="L40S"),
    Gpu("l4", 23034, 121.0, 30.3, 300.0, 32.0, 242.5, kernels=_ADA, watts=72, device="L4"),
    Gpu("rtx-4090", 24564, 165.2, 82.6, 1008.0, 32.0, 330.3, kernels=_ADA, watts=450, device="RTX 4090"),
    Gpu("rtx-3090", 24576, 71.0, 35.6, 936.0, 32.0, kernels=_AMPERE, watts=350, device="RTX 3090"),
    Gpu("v100-16gb", 16160, 125.0, 15.7, 900.0, 150.0, bf16=False, kernels=_VOLTA, watts=300, device="V100"),
    Gpu("v100-32gb", 32510, 125.0, 15.7, 900.0, 150.0, bf16=False, kernels=_VOLTA, watts=300, device="V100"),
    Gpu("t4", 15360, 65.0, 8.1, 320.0, 16.0, bf16=False, kernels=_TURING, watts=70, device="T4"),
)
GPUS: Final = {gpu.name: gpu for gpu in _TABLE}
_ALIASES: Final = {"h100": "h100-80gb", "a100": "a100-80gb", "v100": "v100-16gb", "v100-32g": "v100-32gb"}
_MEMORY_ONLY: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,6})?)gib")


def find_gpu(name: str, where: str) -> Gpu:
    """Returns the GPU of this name. ``24gib`` is a GPU with only its memory known. Raises :class:`RequestError`."""
    lower = name.lower()
    if (match := _MEMORY_ONLY.fullmatch(lower)) and (memory_mib := round(float(match[1]) * 1024)):
        return Gpu(lower, memory_mib)
    gpu = GPUS.get(_ALIASES.get(lower, lower))
    if gpu is None:
        todo = f"use one of {', '.join(sorted(GPUS))}, or its memory alone, as in 24gib"
        raise RequestError(Problem(where, "is not a known GPU", repr(cut(name, 80)), todo))
    return gpu


def of_device(device: str, memory_mib: int | None = None) -> Gpu | None:
    """Returns the GPU for a driver's name such as ``Tesla V100-SXM2-16GB``; ``memory_mib`` decides between variants.

    Returns None for a GPU that is not listed.
    """
    fitting = [gpu for gpu in _TABLE if re.search(rf"\b{gpu.device}\b", device)]
    fitting = [gpu for gpu in fitting if gpu.device == fitting[0].device]
    if memory_mib is None or not fitting:
        return fitting[0] if fitting else None
    return min(fitting, key=lambda gpu: abs(gpu.memory_mib - memory_mib))
