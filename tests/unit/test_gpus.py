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
        ("NVIDIA GH200 144G HBM3e", 146831, "gh200-144gb"),
        ("NVIDIA H200 NVL", 143771, "h200-nvl"),
        ("NVIDIA H800", 81559, "h800"),
        ("NVIDIA H20", 97871, "h20-96gb"),
        ("NVIDIA H20-3e", 143771, "h20-141gb"),
        ("NVIDIA A800-SXM4-80GB", 81920, "a800"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-pcie"),
        ("NVIDIA A40", 46068, "a40"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA L40", 46068, "l40"),
        ("NVIDIA L20", 46068, "l20"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
        ("NVIDIA GB10", 122570, "gb10"),
        ("AMD Instinct MI300X", 196592, "mi300x"),
        ("AMD Instinct MI325X", 262128, "mi325x"),
        ("AMD Instinct MI355X", 294896, "mi355x"),
    ],
)
def test_a_drivers_name(device: str, memory: int, name: str) -> None:
    gpu = of_device(device, memory)
    assert gpu is GPUS[name]


@pytest.mark.parametrize("device", ["cpu", "", "AMD Instinct MI250", "Tesla K80"])
def test_a_device_that_is_not_listed(device: str) -> None:
    assert of_device(device, 1000) is None


def test_without_its_memory_the_first_of_a_name() -> None:
    assert of_device("Tesla V100-SXM2-16GB") is GPUS["v100-16gb"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("V100-16GB", "v100-16gb"),
        ("v100-32g", "v100-32gb"),
        ("h100", "h100-80gb"),
        ("nvidia_h100_80gb_hbm3", "h100-80gb"),
        ("nvidia_h100_nvl", "h100-nvl"),
        ("nvidia_a100-sxm4-40gb", "a100-40gb"),
        ("nvidia_a100_80gb_pcie", "a100-pcie"),
        ("a100_40g", "a100-40gb"),
        ("tesla_v100-sxm2-32gb", "v100-32gb"),
        ("nvidia_gh200_480gb", "gh200-96gb"),
        ("nvidia_gh200_144g_hbm3e", "gh200-144gb"),
        ("nvidia_l40s", "l40s"),
        ("nvidia_geforce_rtx_4090", "rtx-4090"),
        ("MI300X", "mi300x"),
    ],
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


@pytest.mark.parametrize(
    ("name", "which"), [("a100", "a100-40gb or a100-80gb"), ("v100", "v100-16gb or v100-32gb"),
                        ("nvidia_h20", "h20-96gb or h20-141gb"), ("gh200", "gh200-96gb or gh200-144gb")]
)  # fmt: skip
def test_a_name_of_two_sizes_is_asked_about(name: str, which: str) -> None:
    with pytest.raises(RequestError) as caught:
        find_gpu(name, "--gpu")
    assert str(caught.value) == f"--gpu: is the name of several GPUs; got '{name}'; say which: {which}"


@pytest.mark.parametrize("name", ["a100_1g.5gb", "nvidia_a100_3g.40gb", "h100-94gb", "v100-64gb", "l400", "gpu", "gb"])
def test_a_part_of_a_gpu_and_other_sizes_are_unknown(name: str) -> None:
    with pytest.raises(RequestError, match=r"is not a known GPU"):
        find_gpu(name, "--gpu")


def test_an_unknown_name() -> None:
    with pytest.raises(RequestError) as caught:
        find_gpu("v200", "lab.yaml: gpu")
    assert str(caught.value) == (
        f"lab.yaml: gpu: is not a known GPU; got 'v200'; use one of {', '.join(sorted(GPUS))}, or its memory alone, "
        "as in 24gib"
    )


def test_every_rate_of_a_listed_one_is_there() -> None:
    for gpu in GPUS.values():
        rates = (gpu.tflops("fp16"), gpu.tflops("fp32"), gpu.memory_gb_s, gpu.link_gb_s)
        assert all(rate is not None and rate > 0 for rate in rates), gpu.name


def test_tf32_is_faster_than_fp32_where_a_gpu_has_it() -> None:
    gpus = [find_gpu(name, "--gpu") for name in ("a100-80gb", "v100-32gb")]
    assert [(gpu.tflops("fp32"), gpu.tflops("fp32", tf32=True)) for gpu in gpus] == [(19.5, 156.0), (15.7, 15.7)]
