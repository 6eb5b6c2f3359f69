"""NVIDIA's PyTorch images that Tridock builds on, and the choice of one for a machine's GPUs.

``python3 tridock/base_images.py`` prints the image for this machine. ``make image`` calls it before a virtual
environment exists, so it uses only the standard library and runs on Python 3.8.
"""

import re
import subprocess
from typing import NamedTuple, Optional, Sequence, Tuple  # noqa: UP035 (Python 3.8)

Capability = Tuple[int, int]  # noqa: UP006 (Python 3.8)
"""Compute capability: (9, 0) for an H100."""


class BaseImage(NamedTuple):
    """One base image. A version of None is not recorded here; the image's own manifest has it."""

    name: str
    python: str
    torch: str
    cuda: str
    driver: int
    """The oldest branch of NVIDIA's driver that runs the image's CUDA without forward compatibility."""
    least: Capability
    """The lowest compute capability that the image's torch has kernels for."""
    transformer_engine: Optional[str] = None  # noqa: UP045 (Python 3.8)
    nccl: Optional[str] = None  # noqa: UP045 (Python 3.8)
    numpy: Optional[str] = None  # noqa: UP045 (Python 3.8)
    apex: bool = True

    @property
    def build(self) -> str:
        """The command that builds Tridock's image on this base."""
        return f"tridock image --base-image {self.name}"


# Newest first. Sources: NVIDIA's release notes (docs.nvidia.com/deeplearning/frameworks/pytorch-release-notes, pages
# rel-25-12.html and rel-24-12.html). The torch of 24.12 is commit df5bbc09d1 of October 2024, older than 2.6. Its NCCL
# is what a run on four H200 in it printed (github.com/weiyu1218/MForge, "NCCL 2.23.4+cuda12.6"); a user of it reports
# that its torch is compiled for NumPy 1 and cannot exchange arrays with NumPy 2.
BASE_IMAGES = (
    BaseImage("nvcr.io/nvidia/pytorch:25.12-py3", "3.12", "2.10.0a0", "13.1", 580, (7, 5), "2.10", "2.28.9"),
    BaseImage("nvcr.io/nvidia/pytorch:24.12-py3", "3.12", "2.6.0a0", "12.6", 525, (7, 0), nccl="2.23.4", numpy="1.x"),
)


def base_for(capabilities: Sequence[Capability], cuda: Optional[str] = None) -> Optional[BaseImage]:  # noqa: UP045
    """Returns the newest image that has kernels for all GPUs and whose CUDA major version the driver supports.

    ``cuda`` is the driver's CUDA version. Returns None if no image fits.
    """
    for image in BASE_IMAGES:
        fits = all(capability >= image.least for capability in capabilities)
        if fits and (cuda is None or _major(image.cuda) <= _major(cuda)):
            return image
    return None


def has_kernels(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether code for ``architectures`` (``sm_90``, ``compute_90``) runs on a GPU.

    Machine code (``sm_``) also runs on later minor versions of the same major version, PTX (``compute_``) on every
    later version, and ``sm_90a`` only on exactly that version.
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
    """Parses ``9.0`` as ``nvidia-smi --query-gpu=compute_cap`` prints it; returns None for anything else."""
    found = re.fullmatch(r"(\d+)\.(\d)", text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _major(version: str) -> int:
    return int(version.split(".")[0])


def main() -> None:
    """Prints the image for this machine's GPUs, or the newest image on a machine without GPUs."""
    try:
        argv = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        listed = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout.decode()
    except OSError:
        listed = ""
    found = [capability for line in listed.splitlines() if (capability := parse_capability(line)) is not None]
    print((base_for(found) or BASE_IMAGES[-1]).name)


if __name__ == "__main__":
    main()
