"""The GPUs that a run on this machine uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.contracts.test_devices import SLICED, WHOLE
from tridock.ops.runs import this_machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    this_machine._listed.cache_clear()
    return tmp_path


def nvidia_smi(folder: Path, listing: str) -> None:
    (folder / "listing").write_text(listing)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat '{folder}/listing'\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("visible", "listing", "ranks", "devices"),
    [
        (None, WHOLE, 2, None),
        (None, SLICED, 3, "MIG-c7384736-a75d-5afc-978f-d2f1294409fd,MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d,"
                          "GPU-0b757f86-2a2b-5b6c-8b0c-3d1b9e1ff5c2"),
        ("1", WHOLE, 1, "1"),
        ("GPU-83a1d6de-25c9-1c0f-90f2-0d4b0f1a7a10", WHOLE, 1, "GPU-83a1d6de-25c9-1c0f-90f2-0d4b0f1a7a10"),
        ("", WHOLE, 2, ""),
        (None, "", 2, None),
        ("0", "", 2, "0"),
    ],
)  # fmt: skip
def test_ranks_by_the_devices_that_are_visible(
    machine: Path, visible: str | None, listing: str, ranks: int, devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(machine, listing)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine.default_ranks() == ranks
    assert this_machine.node_environment(ranks).get("TRIDOCK_DEVICES") == devices


def test_ranks_on_the_cpu_do_not_follow_the_gpus(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(machine, WHOLE + WHOLE)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert this_machine.default_ranks() == 2
    assert "TRIDOCK_DEVICES" not in os.environ


def test_gpus_that_a_container_does_not_get_are_counted(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker without --gpus: the driver's files are in /proc, and there is no nvidia-smi."""
    driver = tmp_path / "gpus"
    for place in ("0000:01:00.0", "0000:02:00.0"):
        (driver / place).mkdir(parents=True)
    assert this_machine.hidden_gpus(driver) == 2
    assert this_machine.hidden_gpus(tmp_path / "none") == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # they were meant
    assert this_machine.hidden_gpus(driver) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine.hidden_gpus(driver) == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert this_machine.hidden_gpus(driver) == 0
    monkeypatch.delenv("DS_ACCELERATOR")
    nvidia_smi(machine, WHOLE)
    this_machine._listed.cache_clear()
    assert this_machine.hidden_gpus(driver) == 0


def test_the_plan_counts_the_memory_of_the_devices_that_are_visible(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "nvidia-smi").write_text(
        "#!/bin/sh\ncase \"$*\" in *--list-gpus*) ;; *--id=1*) echo '81559, Big' ;;\n"
        "*) echo '81559, Big'; echo '1024, Small' ;; esac\n"
    )
    (machine / "nvidia-smi").chmod(0o755)
    found = this_machine.gpu_here()
    assert found is not None
    assert found.memory_mib == 1024
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = this_machine.gpu_here()
    assert found is not None
    assert found.memory_mib == 81559
    for name, value in (("CUDA_VISIBLE_DEVICES", "MIG-aa"), ("CUDA_VISIBLE_DEVICES", ""), ("DS_ACCELERATOR", "cpu")):
        monkeypatch.setenv(name, value)
        assert this_machine.gpu_here() is None
