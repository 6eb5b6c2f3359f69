"""NVIDIA's PyTorch images that Tridock builds on, and which of them runs on a machine's GPUs.

``python3 tridock/base_images.py`` prints the one for this machine. ``make image`` calls it before there is an
environment: only the standard library, and Python 3.8.
"""

import re
import subprocess
from typing import NamedTuple, Optional, Sequence, Tuple  # noqa: UP035 (Python 3.8)

Capability = Tuple[int, int]  # noqa: UP006 (Python 3.8)
"""Compute capability: (9, 0) for an H100."""


class BaseImage(NamedTuple):
    """One image. None stands for a version that is not known here: the image's own manifest has it."""

    name: str
    python: str
    torch: str
    cuda: str
    driver: int
    """The first branch of NVIDIA's driver that runs its CUDA without forward compatibility."""
    least: Capability
    """The least compute capability that its torch has kernels for."""
    transformer_engine: Optional[str] = None  # noqa: UP045 (Python 3.8)
    nccl: Optional[str] = None  # noqa: UP045 (Python 3.8)
    numpy: Optional[str] = None  # noqa: UP045 (Python 3.8)
    apex: bool = True

    @property
    def build(self) -> str:
        """The command that builds on it."""
        return f"tridock image --base-image {self.name}"


# The newest first.
BASE_IMAGES = (
    BaseImage("nvcr.io/nvidia/pytorch:25.12-py3", "3.12", "2.10.0a0", "13.1", 580, (7, 5), "2.10", "2.28.9"),
    BaseImage("nvcr.io/nvidia/pytorch:24.12-py3", "3.12", "2.6.0a0", "12.6", 525, (7, 0)),
)


def base_for(capabilities: Sequence[Capability], cuda: Optional[str] = None) -> Optional[BaseImage]:  # noqa: UP045
    """The newest image that has kernels for all GPUs and whose CUDA is not of a later major version than ``cuda``,
    that of the driver; None if there is none.
    """
    for image in BASE_IMAGES:
        fits = all(capability >= image.least for capability in capabilities)
        if fits and (cuda is None or _major(image.cuda) <= _major(cuda)):
            return image
    return None


def has_kernels(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether code for ``architectures`` (``sm_90``, ``compute_90``) runs on a GPU: machine code on a later minor
    version of its own major one, PTX (``compute_``) on everything later. ``sm_90a`` runs on its own version alone.
    """
    for kind, major, minor, own in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(architectures)):
        built = (int(major), int(minor))
        if own:
            fits = kind == "sm" and built == capability
        else:
            fits = built <= capability and (kind == "compute" or built[0] == capability[0])
        if fits:
            return True
    return False


def parse_capability(text: str) -> Optional[Capability]:  # noqa: UP045 (Python 3.8)
    """``9.0`` as ``nvidia-smi --query-gpu=compute_cap`` prints it; None for anything else."""
    found = re.fullmatch(r"(\d+)\.(\d)", text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _major(version: str) -> int:
    return int(version.split(".")[0])


def main() -> None:
    """Prints the image for this machine's GPUs; without GPUs, the newest."""
    try:
        argv = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        listed = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.decode()
    except OSError:
        listed = ""
    found = [capability for line in listed.splitlines() if (capability := parse_capability(line)) is not None]
    print((base_for(found) or BASE_IMAGES[-1]).name)


if __name__ == "__main__":
    main()
