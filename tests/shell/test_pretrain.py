"""The scripts that upstream's users know: the command line that each makes of its environment and options."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import STEP_S

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "entrypoint"
CONFIGS = "/opt/tridock/configs"


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A `tridock` that prints its argv."""
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = folder / "tridock"
    fake.write_text('#!/bin/sh\n[ "$1" = data ] || printf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    return folder


def call(script: str, bin_folder: Path, *argv: str, megatron: bool = True, **env: str) -> tuple[int, list[str], str]:
    source = bin_folder.parent / "megatron"
    source.mkdir(exist_ok=True)
    if megatron:
        (source / "pretrain_gpt2.py").touch()
    given = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "TRIDOCK_MEGATRON": str(source), **env}
    command = [str(ENTRYPOINT / script), *argv]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=STEP_S, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("script", "twin", "ranks"),
    [
        ("ds_pretrain_gpt2.sh", "megatron/tiny-345m", "2"),
        ("ds_pretrain_gpt2_pipe.sh", "megatron/tiny-345m-3d", "4"),
        ("pretrain_gpt2_distributed.sh", "megatron/tiny-345m-distributed", "2"),
        ("pretrain_gpt.sh", "jean-zay/tiny-7.5b", "4"),
    ],
)
def test_the_tiny_twin_by_default(bin_folder: Path, script: str, twin: str, ranks: str) -> None:
    assert (ROOT / f"configs/{twin}.yaml").is_file()
    code, argv, _ = call(script, bin_folder)
    assert (code, argv) == (0, ["train", f"{CONFIGS}/{twin}.yaml", "--nproc", ranks])


@pytest.mark.parametrize(
    ("env", "argv"),
    [
        ({}, []),
        ({"GPUS_PER_NODE": "4"}, ["--nproc", "4"]),
        ({"DLWS_NUM_GPU_PER_WORKER": "4", "DLWS_NUM_WORKER": "1"}, ["--nproc", "4"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["--nproc", "2"]),
        ({"DS_ACCELERATOR": "cpu"}, ["--nproc", "2"]),
    ],
)
def test_a_machine_with_gpus_trains_on_all_of_them(bin_folder: Path, env: dict[str, str], argv: list[str]) -> None:
    """Without --nproc, `tridock train` starts a rank for every GPU."""
    (bin_folder / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU %d: NVIDIA H200\\n' 0 1 2 3 4 5 6 7\n")
    (bin_folder / "nvidia-smi").chmod(0o755)
    code, found, _ = call("ds_pretrain_gpt2.sh", bin_folder, **env)
    assert (code, found) == (0, ["train", f"{CONFIGS}/megatron/tiny-345m.yaml", *argv])


def test_options_win_over_variables(bin_folder: Path) -> None:
    code, found, _ = call("ds_pretrain_gpt2.sh", bin_folder, "--nproc", "2", GPUS_PER_NODE="4")
    assert (code, found[2:]) == (0, ["--nproc", "4", "--nproc", "2"])


def test_options_and_arguments_of_megatron(bin_folder: Path) -> None:
    argv = ["--set", "train.seed=7", "--num-workers", "0", "--nproc", "8", "--bias-gelu-fusion"]
    code, found, _ = call("ds_pretrain_gpt2.sh", bin_folder, *argv, TRIDOCK_EXPERIMENT="mine.yaml")
    assert code == 0
    assert found == [
        "train", "mine.yaml", "--set", "train.seed=7", "--nproc", "8",
        "--set", 'megatron_args=["--num-workers", "0", "--bias-gelu-fusion"]',
    ]  # fmt: skip


def test_what_upstreams_users_set_wins_and_is_printed(bin_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"  # empty: the first start begins from scratch
    env = {
        "GPUS_PER_NODE": "4", "NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "6000",
        "DATA_PATH": "data/it's_text", "VOCAB_PATH": "v.json", "MERGE_PATH": "m.txt", "CHECKPOINT_PATH": str(saved),
    }  # fmt: skip
    code, found, err = call("ds_pretrain_gpt2.sh", bin_folder, **env)
    assert code == 0
    assert found == [
        "train", f"{CONFIGS}/megatron/tiny-345m.yaml",
        "--set", 'data.data_path="data/it\'s_text"', "--set", 'data.vocab_file="v.json"',
        "--set", 'data.merge_file="m.txt"', "--set", f'train.checkpoint_folder="{saved}"',
        "--set", f'train.load="{saved}"', "--set", "launch.master_port=6000", "--nproc", "4",
    ]  # fmt: skip
    assert "ds_pretrain_gpt2.sh: DATA_PATH=data/it's_text sets data.data_path\n" in err
    assert "ds_pretrain_gpt2.sh: GPUS_PER_NODE=4 ranks\n" in err


def test_a_deepspeed_json_of_the_users(bin_folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "ds.json"
    given.write_text('{"wall_clock_breakdown": true}\n')
    argv = ("--deepspeed", "--deepspeed_config", str(given))
    code, found, _ = call("ds_pretrain_gpt2.sh", bin_folder, *argv, TRIDOCK_EXPERIMENT="mine.yaml")
    assert (code, found) == (0, ["train", "mine.yaml", "--set", 'deepspeed={"wall_clock_breakdown": true}'])
    code, _, err = call("ds_pretrain_gpt2.sh", bin_folder, "--deepspeed_config", "none.json")
    assert code == 2
    assert err == "ds_pretrain_gpt2.sh: --deepspeed_config: cannot be read; got none.json; give DeepSpeed's JSON\n"


def test_one_of_several_nodes(bin_folder: Path) -> None:
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "gpu-1", "MASTER_PORT": "6000", "GPUS_PER_NODE": "8"}
    code, found, err = call("pretrain_gpt2_distributed.sh", bin_folder, **env)
    assert code == 0
    assert found == [
        "train", f"{CONFIGS}/megatron/tiny-345m-distributed.yaml", "--set", "launch.master_port=6000", "--nproc", "8",
        "--nnodes", "2", "--node-rank", "1", "--master-addr", "gpu-1",
    ]  # fmt: skip
    assert "pretrain_gpt2_distributed.sh: NNODES=2 NODE_RANK=1 MASTER_ADDR=gpu-1: this node is one of several\n" in err


def test_an_image_without_megatron(bin_folder: Path) -> None:
    code, argv, err = call("ds_pretrain_gpt2.sh", bin_folder, megatron=False)
    assert (code, argv) == (0, ["train", f"{CONFIGS}/demo.yaml", "--nproc", "2"])
    assert "this image is without Megatron-LM v1.1.5: the torch engine trains\n" in err
    code, _, err = call("ds_pretrain_gpt2_pipe.sh", bin_folder, megatron=False)
    assert code == 2
    assert "engine: this image is without Megatron-LM v1.1.5; got " in err
    assert err.endswith("; build it with its source: tridock image --megatron WHERE\n")


def test_megatron_core_is_in_every_image(bin_folder: Path) -> None:
    env = {"DATA_PATH": "data/mine", "GPUS_PER_NODE": "2"}
    code, argv, _ = call("pretrain_gpt.sh", bin_folder, "--set", "train.seed=7", megatron=False, **env)
    assert (code, argv) == (0, [
        "train", f"{CONFIGS}/jean-zay/tiny-7.5b.yaml", "--set", 'data.data_path="data/mine"', "--nproc", "2",
        "--set", "train.seed=7",
    ])  # fmt: skip
