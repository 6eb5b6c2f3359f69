"""The base image for a machine's GPUs and driver, and what torch's kernels run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tridock.base_images import BASE_IMAGES, base_for, has_kernels, parse_capability

ROOT = Path(__file__).parents[2]
NEWEST, VOLTA = (image.name for image in BASE_IMAGES)
# As torch 2.13 for CUDA 13.0 and NVIDIA's images print them.
CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("capabilities", "cuda", "name"),
    [
        ([], None, NEWEST),
        ([(9, 0), (7, 5)], None, NEWEST),
        ([(9, 0), (7, 0)], None, VOLTA),
        ([(9, 0)], "13.0", NEWEST),
        ([(9, 0)], "12.4", VOLTA),
        ([(7, 0)], "13.0", VOLTA),
    ],
)
def test_the_newest_base_that_gpus_and_driver_allow(
    capabilities: list[tuple[int, int]], cuda: str | None, name: str
) -> None:
    found = base_for(capabilities, cuda)
    assert found is not None
    assert found.name == name


def test_no_base_for_older_gpus_and_drivers() -> None:
    assert base_for([(6, 0)]) is None
    assert base_for([(7, 0)], "11.8") is None


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (CUDA_13, (7, 0), False),
        (CUDA_13, (8, 9), True),
        (CUDA_13, (10, 3), True),
        (CUDA_13, (11, 0), False),
        (("sm_86",), (8, 0), False),
        (("sm_80", "compute_80"), (12, 0), True),
        (("sm_80", "compute_80"), (7, 5), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
    ],
)
def test_machine_code_runs_on_its_own_generation_and_ptx_on_all_later(
    built: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert has_kernels(built, capability) is runs


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (None, NEWEST),
        ("echo 9.0; echo 9.0", NEWEST),
        ("echo 8.0; echo 7.0", VOLTA),
        ("echo 6.1", VOLTA),
        ("echo '[N/A]'", NEWEST),
        ("echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2", NEWEST),
    ],
)
def test_make_image_asks_for_the_one_for_this_machines_gpus(tmp_path: Path, script: str | None, name: str) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": str(tmp_path)}
    argv = [sys.executable, "-I", "-S", str(ROOT / "tridock/base_images.py")]
    assert subprocess.check_output(argv, env=env, text=True) == f"{name}\n"


def test_a_capability_is_read() -> None:
    assert (parse_capability("12.1"), parse_capability(" 7.5\n"), parse_capability("")) == ((12, 1), (7, 5), None)


def test_what_names_a_base_by_itself_names_the_newest() -> None:
    assert f"ARG BASE_IMAGE={NEWEST}\n" in (ROOT / "Dockerfile").read_text()
    assert f"BASE_IMAGE: {NEWEST}\n" in (ROOT / "docker-compose.gpu.yml").read_text()
