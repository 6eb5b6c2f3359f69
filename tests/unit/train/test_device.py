"""The device of a rank on machines whose GPU torch cannot use."""

from pathlib import Path

import pytest
import torch

from tridock.errors import RunError
from tridock.train.rank import device
from tridock.train.rank.device import choose_device

NOT_READY = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)
TODO = (
    "see what nvidia-smi and tridock check say there, or set DS_ACCELERATOR: cpu in the experiment's env to train on "
    "the CPU"
)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """torch as it is where the fabric manager does not run; returns the only folder on PATH."""

    def init() -> None:
        raise RuntimeError(NOT_READY)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return tmp_path


def nvidia_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def refusal(local_rank: int = 0) -> str:
    with pytest.raises(RunError) as caught:
        choose_device(local_rank)
    return str(caught.value)


def test_an_image_for_gpus_does_not_train_on_the_cpu(without_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert refusal() == f"device: torch has no GPU for local rank 0; got {NOT_READY}; {TODO}"


def test_where_nvidia_smi_lists_gpus_the_cpu_is_no_silent_choice(
    without_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(without_cuda, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal() == (
        f"device: torch has no GPU for local rank 0; got {NOT_READY} (CUDA_VISIBLE_DEVICES=''); {TODO}"
    )


def test_fewer_gpus_than_ranks(without_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    got = "1 visible (CUDA_VISIBLE_DEVICES='5')"
    assert refusal(1) == f"device: torch has no GPU for local rank 1; got {got}; {TODO}"


def test_the_cpu_is_chosen_by_an_explicit_word_or_where_there_is_no_gpu(
    without_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(without_cuda, "echo 'No devices were found'; exit 6")
    assert choose_device(0) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    nvidia_smi(without_cuda, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device(0) == torch.device("cpu")


@pytest.mark.parametrize(("version", "enabled"), [("2.6.0a0+df5bbc09d1.nv24.12", False), ("2.6.0+cu126", True)])
def test_the_attention_of_base_image_24_12_is_not_cudnns(
    monkeypatch: pytest.MonkeyPatch, version: str, enabled: bool
) -> None:
    """There cuDNN's comes first on an H100, and its gradients are wrong."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        assert choose_device(0) == torch.device("cuda", 0)
        assert torch.backends.cuda.cudnn_sdp_enabled() is enabled
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_driver_that_hangs(without_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SMI_S", 0.2)
    nvidia_smi(without_cuda, "exec /bin/sleep 300")
    with pytest.raises(RunError) as caught:
        choose_device(0)
    assert str(caught.value) == (
        "device: nvidia-smi does not say whether there are GPUs; got nothing within 0.2 s; see what the driver says "
        "there (dmesg), or set DS_ACCELERATOR: cpu in the experiment's env"
    )
