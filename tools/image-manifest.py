#!/usr/bin/env python3
"""Prints the image's manifest: every version in it, as JSON. Runs inside the image, at its build."""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tridock.experiment import fields_digest

NOTABLE_DISTRIBUTIONS = ("deepspeed", "megatron-core", "numpy", "tokenizers")
MEGATRON = Path("/opt/megatron-v1.1.5/tridock-source.json")
DEBIAN_PACKAGES = ("libc6", "numactl", "openssh-client", "openssh-server", "pdsh", "procps", "rsync", "tini")


def python_packages() -> dict[str, str]:
    """Every distribution that Python sees, by name. The first of a name on the path is the one that is imported.

    The metadata of a distribution may lack its version, as in NVIDIA's image 24.12; without a name it is left out.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        facts = distribution.metadata.json
        if "name" in facts:
            found.setdefault(str(facts["name"]).lower(), str(facts.get("version", "unknown")))
    return dict(sorted(found.items()))


def debian_packages() -> dict[str, str]:
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\n", *DEBIAN_PACKAGES]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split(" ", 1) for line in lines)


def values_of(distribution: str, file: str) -> dict[str, Any]:
    """The names that a generated file of a package assigns. Read, not imported: importing torch takes seconds."""
    return runpy.run_path(str(metadata.distribution(distribution).locate_file(file)))


def torch_build() -> dict[str, str | list[str] | None]:
    """torch's version with the build in it, which its distribution's version may lack, its CUDA's, and the
    architectures that a build with CUDA has kernels for: only torch itself knows those.
    """
    values = values_of("torch", "torch/version.py")
    built: list[str] = []
    if values["cuda"]:
        program = "import torch; print(torch._C._cuda_getArchFlags())"
        built = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout.split()
    return {"torch": values["__version__"], "cuda": values["cuda"], "torch_architectures": built}


def deepspeed_ops() -> list[str]:
    """The ops that were compiled with DeepSpeed."""
    ops = values_of("deepspeed", "deepspeed/git_version_info_installed.py")["installed_ops"]
    return sorted(name for name, built in ops.items() if built)


def megatron() -> dict[str, object] | None:
    """Where the engine's source comes from and how it was patched; None in an image without it."""
    try:
        return dict(json.loads(MEGATRON.read_text()))
    except FileNotFoundError:
        return None


def os_name() -> str:
    return platform.freedesktop_os_release()["PRETTY_NAME"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("flavor", "base-image", "git-commit", "version"):
        parser.add_argument(f"--{option}", required=True)
    given = parser.parse_args()
    packages = python_packages()
    manifest = {
        "tridock": given.version,
        "git_commit": given.git_commit,
        "experiment_fields": fields_digest(),
        "flavor": given.flavor,
        "base_image": given.base_image,
        "os": os_name(),
        "python": platform.python_version(),
        **torch_build(),
        **{name.replace("-", "_"): packages[name] for name in NOTABLE_DISTRIBUTIONS},
        "deepspeed_ops": deepspeed_ops(),
        "megatron_v1_1_5": megatron(),
        "debian_packages": debian_packages(),
        "python_packages": packages,
    }
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    main()
