"""The table of GPUs: found by a person's name, by a driver's, and by memory where the name is shared."""

import pytest

from tridock.errors import RequestError
from tridock.gpus import GPUS, Gpu, find_gpu, of_device


@pytest.mark.parametrize(
    ("device", "memory", "name"),
    [
        ("NVIDIA GB300", 284208, "gb300"),
        ("NVIDIA GB200", 189471, "gb200"),
        ("NVIDIA B300 SXM6 AC", 275040, "b300"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40536, "a100-40gb"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32gb"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A10", 23028, "a10"),
        ("Tesla T4", 15360, "t4"),
    ],
)
def test_a_drivers_name(device: str, memory: int, name: str) -> None:
    gpu = of_device(device, memory)
    assert gpu is GPUS[name]


@pytest.mark.parametrize("device", ["cpu", "", "AMD Instinct MI300X", "Tesla K80"])
def test_a_device_that_is_not_listed(device: str) -> None:
    assert of_device(device, 1000) is None


def test_without_its_memory_the_first_of_a_name() -> None:
    assert of_device("Tesla V100-SXM2-16GB") is GPUS["v100-16gb"]


@pytest.mark.parametrize(
    ("name", "found"), [("V100-16GB", "v100-16gb"), ("v100-32g", "v100-32gb"), ("h100", "h100-80gb")]
)
def test_a_persons_name(name: str, found: str) -> None:
    assert find_gpu(name, "--gpu") is GPUS[found]


def test_memory_alone() -> None:
    gpu = find_gpu("24gib", "--gpu")
    assert gpu == Gpu("24gib", 24 * 1024)
    assert (gpu.tflops("bf16"), gpu.memory_bytes) == (None, 24 << 30)


@pytest.mark.parametrize("name", ["0gib", "0.0001gib", "-4gib", "gib"])
def test_no_memory_is_no_gpu(name: str) -> None:
    with pytest.raises(RequestError, match=r"is not a known GPU"):
        find_gpu(name, "--gpu")


def test_an_unknown_name() -> None:
    with pytest.raises(RequestError) as caught:
        find_gpu("v200", "lab.yaml: gpu")
    assert str(caught.value) == (
        "lab.yaml: gpu: is not a known GPU; got 'v200'; use one of a10, a100-40gb, a100-80gb, a100-pcie, a6000, b200, "
        "b300, gb200, gb300, gh200-96gb, h100-80gb, h100-nvl, h100-pcie, h200, l4, l40s, rtx-3090, rtx-4090, t4, "
        "v100-16gb, v100-32gb, or its memory alone, as in 24gib"
    )


def test_every_rate_of_a_listed_one_is_there() -> None:
    for gpu in GPUS.values():
        rates = (gpu.tflops("fp16"), gpu.tflops("fp32"), gpu.memory_gb_s, gpu.link_gb_s)
        assert all(rate is not None and rate > 0 for rate in rates), gpu.name


def test_tf32_is_faster_than_fp32_where_a_gpu_has_it() -> None:
    gpus = [find_gpu(name, "--gpu") for name in ("a100-80gb", "v100-32gb")]
    assert [(gpu.tflops("fp32"), gpu.tflops("fp32", tf32=True)) for gpu in gpus] == [(19.5, 156.0), (15.7, 15.7)]
