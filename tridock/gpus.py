"""GPUs by name: memory size, peak compute, memory and link bandwidth. From NVIDIA's data sheets.

Memory is what ``nvidia-smi`` shows as the total; rates are dense (without sparsity), decimal, one direction.
"""

import re
from dataclasses import dataclass
from typing import Final

from tridock.errors import Problem, RequestError

MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. None where the figure is not known."""

    name: str
    memory_mib: int
    """What ``nvidia-smi`` shows as the total."""
    tflops_16: float | None = None
    """Dense TFLOP/s of fp16 and (where there is any) bf16 matrix products, accumulated in fp32."""
    tflops_32: float | None = None
    """TFLOP/s of fp32, without TF32."""
    memory_gb_s: float | None = None
    """Reading or writing its own memory, GB/s."""
    link_gb_s: float | None = None
    """To the other GPUs of its node, GB/s in one direction: NVLink, or PCIe where there is none."""
    bf16: bool = True
    """Compute capability 8.0 and above."""
    device: str = ""
    """A part of the name that the driver gives it; memory tells apart those that share one."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    def tflops(self, precision: str, tf32: bool = False) -> float | None:
        """Peak TFLOP/s in ``fp32``, ``bf16`` or ``fp16``; TF32, where there is any, is half as fast as bf16."""
        if precision != "fp32":
            return self.tflops_16
        return self.tflops_16 / 2 if tf32 and self.bf16 and self.tflops_16 else self.tflops_32


# The more special name first: `of_device` takes the first that fits.
_TABLE: Final = (
    Gpu("b200", 183359, 2250.0, 75.0, 8000.0, 900.0, device="B200"),
    Gpu("h200", 143771, 989.4, 66.9, 4800.0, 450.0, device="H200"),
    Gpu("gh200-96gb", 97871, 989.4, 66.9, 4000.0, 450.0, device="GH200"),
    Gpu("h100-pcie", 81559, 756.0, 51.2, 2000.0, 64.0, device="H100 PCIe"),
    Gpu("h100-nvl", 95830, 835.0, 60.0, 3900.0, 300.0, device="H100 NVL"),
    Gpu("h100-80gb", 81559, 989.4, 66.9, 3350.0, 450.0, device="H100"),
    Gpu("a100-40gb", 40960, 312.0, 19.5, 1555.0, 300.0, device="A100"),
    Gpu("a100-80gb", 81920, 312.0, 19.5, 2039.0, 300.0, device="A100"),
    Gpu("a6000", 49140, 154.8, 38.7, 768.0, 32.0, device="RTX A6000"),
    Gpu("a10", 23028, 125.0, 31.2, 600.0, 32.0, device="A10"),
    Gpu("l40s", 46068, 362.0, 91.6, 864.0, 32.0, device="L40S"),
    Gpu("l4", 23034, 121.0, 30.3, 300.0, 32.0, device="L4"),
    Gpu("rtx-4090", 24564, 165.2, 82.6, 1008.0, 32.0, device="RTX 4090"),
    Gpu("rtx-3090", 24576, 71.0, 35.6, 936.0, 32.0, device="RTX 3090"),
    Gpu("v100-16gb", 16160, 125.0, 15.7, 900.0, 150.0, bf16=False, device="V100"),
    Gpu("v100-32gb", 32510, 125.0, 15.7, 900.0, 150.0, bf16=False, device="V100"),
    Gpu("t4", 15360, 65.0, 8.1, 320.0, 16.0, bf16=False, device="T4"),
)
GPUS: Final = {gpu.name: gpu for gpu in _TABLE}
_ALIASES: Final = {"h100": "h100-80gb", "a100": "a100-80gb", "v100": "v100-16gb", "v100-32g": "v100-32gb"}
_MEMORY_ONLY: Final = re.compile(r"(\d+(?:\.\d+)?)gib")


def find_gpu(name: str, where: str) -> Gpu:
    """The GPU of this name; ``24gib`` is one of which only the memory is known. Raises :class:`RequestError`."""
    lower = name.lower()
    if (match := _MEMORY_ONLY.fullmatch(lower)) and (memory_mib := round(float(match[1]) * 1024)):
        return Gpu(lower, memory_mib)
    gpu = GPUS.get(_ALIASES.get(lower, lower))
    if gpu is None:
        todo = f"use one of {', '.join(sorted(GPUS))}, or its memory alone, as in 24gib"
        raise RequestError(Problem(where, "is not a known GPU", repr(name), todo))
    return gpu


def of_device(device: str, memory_mib: int | None = None) -> Gpu | None:
    """The GPU that a driver names, for example ``Tesla V100-SXM2-16GB``; where several share the name, by its memory.

    None for one that is not listed.
    """
    fitting = [gpu for gpu in _TABLE if re.search(rf"\b{gpu.device}\b", device)]
    fitting = [gpu for gpu in fitting if gpu.device == fitting[0].device]
    if memory_mib is None or not fitting:
        return fitting[0] if fitting else None
    return min(fitting, key=lambda gpu: abs(gpu.memory_mib - memory_mib))
