"""Which torch, and which image, a command gets on a machine with GPUs; nvidia-smi, make, docker, pip are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import STEP_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts, in a folder whose `programs` come first on PATH."""
    (tmp_path / "tools").mkdir()
    for script in ("compose.sh", "on-devices.sh", "venv.sh"):
        shutil.copy(ROOT / "tools" / script, tmp_path / "tools")
    program(tmp_path / "programs/make", 'echo "make $*"')
    program(tmp_path / "programs/docker", 'echo "docker $*"')
    program(tmp_path / "programs/nvidia-smi", "exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return tmp_path


def program(file: Path, script: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/usr/bin/env bash\n{script}\n")
    file.chmod(0o755)


def with_a_gpu(project: Path) -> None:
    program(project / "programs/nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'")


def run(project: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    script, *rest = arguments
    argv = [str(project / "tools" / script), *rest]
    done = subprocess.run(
        argv, cwd=project, env={**os.environ, **env}, capture_output=True, text=True, timeout=STEP_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_torch_gets_its_cuda_build_on_a_machine_with_gpus(project: Path) -> None:
    with_a_gpu(project)
    wanted = "make --no-print-directory venv FLAVOR=gpu\nstep 1\n"
    assert run(project, "on-devices.sh", "venv", "tridock:latest", "echo", "step 1") == (0, wanted, "")


def test_the_cpu_build_is_kept_without_gpus_and_where_the_cpu_is_asked_for(project: Path) -> None:
    kept = (0, "make --no-print-directory venv\nstep\n", "")
    assert run(project, "on-devices.sh", "venv", "tridock:latest", "echo", "step") == kept
    with_a_gpu(project)
    assert run(project, "on-devices.sh", "venv", "tridock:latest", "echo", "step", DS_ACCELERATOR="cpu") == kept


def test_the_image_gets_the_gpus_and_this_folder(project: Path) -> None:
    with_a_gpu(project)
    files = "--file docker-compose.yml --file docker-compose.gpu.yml"
    code, output, _ = run(project, "on-devices.sh", "image", "tridock:latest", "python", "-m", "pytest")
    assert (code, output) == (0, f"docker compose {files} run --rm --env DS_ACCELERATOR trainer python -m pytest\n")


def test_without_the_compose_plugin(project: Path) -> None:
    wrong = "unknown shorthand flag: 'f' in -f"
    program(project / "programs/docker", f'[[ $1 != compose ]] || {{ echo "{wrong}" >&2; exit 125; }}')
    code, output, errors = run(project, "on-devices.sh", "image", "tridock:latest", "true")
    assert (code, output) == (3, "")
    assert errors.startswith(f"docker compose: the Compose plugin is missing on this machine; got {wrong}; install ")


def test_an_image_that_is_not_there(project: Path) -> None:
    program(project / "programs/docker", "echo 'Error: No such image: tridock:latest' >&2; exit 1")
    assert run(project, "on-devices.sh", "image", "tridock:latest", "true") == (
        3,
        "",
        "tridock:latest: the image is not on this machine; got Error: No such image: tridock:latest; "
        "build it with make image, or leave out IN=image\n",
    )


def test_a_place_that_is_none(project: Path) -> None:
    message = "IN: is not venv or image; got cloud; write IN=image for the image, or leave it out for .venv\n"
    assert run(project, "on-devices.sh", "cloud", "tridock:latest", "true") == (2, "", message)


def test_make_image_builds_on_the_base_for_this_machines_gpus(project: Path) -> None:
    shutil.copy(ROOT / "tools/build-image.sh", project / "tools")
    (project / "tridock").mkdir()
    shutil.copy(ROOT / "tridock/base_images.py", project / "tridock")
    program(project / "programs/nvidia-smi", "echo 9.0; echo 7.0")
    program(project / "programs/docker", "case $1 in pull) echo denied; exit 1 ;; image) exit 1 ;; esac")
    code, output, error = run(project, "build-image.sh", "gpu", "auto", "tridock:latest")
    base = "nvcr.io/nvidia/pytorch:24.12-py3"
    why = "(docs/gpus.md has the GPUs and drivers of each; tridock check compares them with the hosts)"
    assert (code, output) == (3, f"base image: {base} {why}\n")
    todo = "log in to its registry, or name another (BASE_IMAGE, or --base-image)"
    assert error == f"{base}: the base image cannot be pulled; got denied; {todo}\n"


# ---- .venv -----------------------------------------------------------------------------------------

PYTHON = """
case "$*" in
*purelib*) echo .venv/lib ;;
*"-m venv"*) mkdir -p .venv/bin .venv/lib; cp "$0" .venv/bin/python ;;
esac"""


@pytest.fixture
def venv_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a Python that makes an empty environment, and installers that print what they were asked for."""
    (project / "locks").mkdir()
    (project / "locks/torch.txt").write_text("torch==2.13.0\n")
    for name in ("install-locked", "install-torch", "install-deepspeed"):
        program(project / f"tools/python/{name}.sh", f'echo "{name} ${{*:2}}"')
    program(project / "programs/python", PYTHON)
    monkeypatch.setenv("PYTHON", str(project / "programs/python"))
    return project


def installed(flavor: str, build: str) -> str:
    return (
        f"venv: installing everything (torch's {build.upper()} build is the largest part)\n"
        f"install-locked locks/extras.txt locks/train-{flavor}.txt locks/dev.txt\n"
        f"install-torch 2.13.0 {build} locks/wheels\ninstall-deepspeed \n"
    )


def test_a_venv_keeps_its_build_of_torch_until_another_is_asked_for(venv_project: Path) -> None:
    marker = venv_project / ".venv/of-the-user"
    assert run(venv_project, "venv.sh", "full") == (0, installed("cpu", "cpu"), "")
    marker.touch()
    rebuilding = "venv: rebuilding .venv, because it has torch's cpu build\n"
    assert run(venv_project, "venv.sh", "full", "gpu") == (0, rebuilding + installed("gpu", "cuda"), "")
    assert not marker.exists()
    assert run(venv_project, "venv.sh", "full") == (0, installed("gpu", "cuda"), "")
    assert {file.name for file in (venv_project / ".venv").iterdir() if file.name[0] == "."} == {
        ".extras", ".full", ".gpu", ".operator",
    }  # fmt: skip


def test_a_flavor_that_is_none(venv_project: Path) -> None:
    todo = "write FLAVOR=gpu for torch's CUDA build, or leave it out"
    assert run(venv_project, "venv.sh", "full", "tpu") == (
        2, "", f"venv: FLAVOR is neither cpu nor gpu; got tpu; {todo}\n",
    )  # fmt: skip
