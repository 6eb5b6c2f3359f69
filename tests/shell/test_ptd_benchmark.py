"""``ptd_benchmark.sh``: options of PyTorch's data parallel benchmark to a torchrun command line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import STEP_S

SCRIPT = Path(__file__).resolve().parents[2] / "entrypoint/ptd_benchmark.sh"
DEMO = ["-m", "tridock.train", "--config", "/opt/tridock/configs/demo.yaml"]


def call(tmp_path: Path, *argv: str, **env: str) -> tuple[int, list[str], str]:
    """Exit code, torchrun's argv and standard error, which also shows the request for demo data."""
    for name, body in {"python3": 'printf "%s\\n" "$@"', "tridock": 'echo "tridock $*" >&2'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
    done = subprocess.run([str(SCRIPT), *argv], env=given, capture_output=True, text=True, timeout=STEP_S, check=False)
    found = done.stdout.splitlines()
    assert found[:2] in (["-m", "torch.distributed.run"], [])
    return done.returncode, found[2:], done.stderr


def test_two_devices_with_ddp(tmp_path: Path) -> None:
    argv = ["--nnodes=1", "--nproc_per_node=2", "--rdzv_id=100", "--rdzv_endpoint=localhost:5678"]
    assert call(tmp_path, *argv) == (
        0,
        ["--nnodes=1", "--rdzv_id=100", "--rdzv_endpoint=localhost:5678", "--nproc_per_node=2", *DEMO, "--mode=ddp"],
        "tridock data demo\n",
    )


def test_a_pipeline_over_two_devices_has_a_process_for_each(tmp_path: Path) -> None:
    argv = ["--nnodes=1", "--nproc_per_node=1", "--rdzv_id=100", "--rdzv_endpoint=localhost:5678"]
    code, found, _ = call(tmp_path, *argv, "--ndevice_per_proc=2", "--mode=pdp")
    assert (code, found) == (0, [
        "--nnodes=1", "--rdzv_id=100", "--rdzv_endpoint=localhost:5678", "--nproc_per_node=2", *DEMO,
        "--ndevice_per_proc=2", "--mode=pdp",
    ])  # fmt: skip


def test_an_experiment_of_ones_own_and_arguments_without_an_equals_sign(tmp_path: Path) -> None:
    argv = ["--nproc-per-node", "4", "--mode", "fsdp", "--set", "model.preset=gpt-xl", "--workspace", "/w x"]
    assert call(tmp_path, *argv, TRIDOCK_EXPERIMENT="mine.yaml") == (
        0,
        ["--standalone", "--nproc_per_node=4", "-m", "tridock.train", "--config", "mine.yaml", "--mode=fsdp",
         "--set", "model.preset=gpt-xl", "--workspace", "/w x"],
        "",
    )  # fmt: skip


def test_an_experiments_own_strategy_holds(tmp_path: Path) -> None:
    code, found, _ = call(tmp_path, TRIDOCK_EXPERIMENT="mine.yaml")
    assert (code, found[2:]) == (0, ["-m", "tridock.train", "--config", "mine.yaml"])


def test_several_nodes(tmp_path: Path) -> None:
    argv = ["--nnodes=4", "--node_rank=1", "--master_addr=gpu-1", "--master_port=29500", "--nproc_per_node=4"]
    code, found, _ = call(tmp_path, *argv, "--mode=pdp", "--ndevice_per_proc=2", TRIDOCK_EXPERIMENT="m.yaml")
    assert (code, found) == (0, [
        *argv[:-1], "--nproc_per_node=8", "-m", "tridock.train", "--config", "m.yaml",
        "--mode=pdp", "--ndevice_per_proc=2",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mode"], "--mode: needs a value; got nothing; write --mode VALUE"),
        (
            ["trainer.py"],
            "trainer.py: is no option; got trainer.py; write --name=value, of torchrun's or trainer.py's",
        ),
        (["--mode=dpp"], "--mode: is not known; got dpp; write ddp, fsdp, pdp or tp"),
        (["--nproc_per_node=gpu"], "--nproc_per_node: must be a whole number; got gpu; write 1 or more"),
        (["--ndevice_per_proc=0"], "--ndevice_per_proc: must be a whole number; got 0; write 1 or more"),
    ],
)
def test_unknown_options_are_refused(tmp_path: Path, argv: list[str], said: str) -> None:
    assert call(tmp_path, *argv) == (2, [], f"ptd_benchmark.sh: {said}\n")
