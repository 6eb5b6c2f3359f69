"""The device of a rank. A rank that should have a GPU never silently trains on the CPU."""

import os
import subprocess
from typing import Final

import torch
from torch.torch_version import TorchVersion

from tridock.contracts.devices import MIG, VISIBLE, listed_devices
from tridock.errors import Problem, RunError

_SMI_S: Final = 120.0


def choose_device(local_rank: int) -> torch.device:
    """Returns the rank's GPU, or the CPU with ``DS_ACCELERATOR=cpu`` and on a machine without GPUs.

    Raises :class:`RunError` with torch's reason if torch finds no GPU for the rank although the image is for GPUs
    (``DS_ACCELERATOR=cuda``) or ``nvidia-smi`` lists some.
    """
    accelerator = os.environ.get("DS_ACCELERATOR")
    index = 0 if os.environ.get(VISIBLE, "").startswith(MIG) else local_rank
    if accelerator != "cpu" and torch.cuda.is_available() and index < torch.cuda.device_count():
        torch.cuda.set_device(index)
        avoid_wrong_gradients()
        return torch.device("cuda", index)
    if accelerator == "cuda" or (accelerator != "cpu" and _driver_lists_gpus()):
        todo = (
            "see what nvidia-smi and tridock check say there, or set DS_ACCELERATOR: cpu in the experiment's env "
            "to train on the CPU"
        )
        raise RunError(Problem("device", f"torch has no GPU for local rank {local_rank}", _reason(), todo))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported: it would warn and probe
    return torch.device("cpu")


def set_tf32(enabled: bool) -> None:
    """Switches TF32 on or off for matrix products and convolutions. It is on in NVIDIA's images, off in torch."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = enabled


def avoid_wrong_gradients() -> None:
    """Switches cuDNN's attention off before torch 2.6, which includes the ``2.6.0a0`` of base image 24.12.

    On an H100 it came first there, and its gradients are wrong or not finite (pytorch/pytorch#138354 and #138522).
    """
    if TorchVersion(torch.__version__) < "2.6":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _reason() -> str:
    """Returns why torch has no GPU for this rank: torch's own message if it has none at all."""
    visible = os.environ.get(VISIBLE)
    among = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: torch's CPU build
        return str(error).strip().splitlines()[0].rstrip(".") + among
    return f"{torch.cuda.device_count()} visible{among}"


def _driver_lists_gpus() -> bool:
    try:
        argv = ["nvidia-smi", "--list-gpus"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        todo = "see what the driver says there (dmesg), or set DS_ACCELERATOR: cpu in the experiment's env"
        got = f"nothing within {_SMI_S:g} s"
        raise RunError(Problem("device", "nvidia-smi does not say whether there are GPUs", got, todo)) from None
    return done.returncode == 0 and bool(listed_devices(done.stdout))
