"""The run's folder before the run: compared with golden files, line for line."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.contracts.supervision import Supervision
from tridock.experiment import parse_experiment
from tridock.launchers.local import Local
from tridock.launchers.run import Launcher, RunBundle, default_port, make_bundle
from tridock.launchers.ssh import Ssh
from tridock.ops.runs.prepare import prepared_from
from tridock.plan import assess

GOLDEN = Path(__file__).parents[2] / "golden" / "launch"
RUN_ID = "tiny-20260102-030405-abcd"
EXPERIMENT = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16}
batch: {micro_batch_size: 1, global_batch_size: 4}
data: {data_path: data/x}
train: {train_iters: 3}
env: {NCCL_DEBUG: INFO, GREETING: it's two words}
"""
CLUSTERS = {
    "two-nodes": {"node-1": [0, 1], "node-2": [0, 1]},
    "one-node": {"node-1": [0, 1, 2, 3]},
    "chosen-slots": {"gpu-1": [4, 5], "gpu-2": [4, 5]},
}
SSH = Ssh()


def bundle(cluster: str, *overrides: str, launcher: Launcher = SSH) -> RunBundle:
    experiment, slots = parse_experiment(EXPERIMENT, "e.yaml", overrides), CLUSTERS[cluster]
    prepared = prepared_from(assess(experiment, slots, "e.yaml"), slots, RUN_ID)
    manifest = {"image": "sha256:1"}
    run = replace(prepared, master_addr=next(iter(slots)), master_port=29500, manifest=manifest)
    return make_bundle(run, launcher)


@pytest.mark.parametrize(
    ("golden", "cluster", "launcher", "name"),
    [
        *((cluster, cluster, SSH, "launch.sh") for cluster in CLUSTERS),
        ("this-machine", "one-node", Local(), "launch.sh"),
        ("second-of-two", "two-nodes", Local(1), "launch-1.sh"),
    ],
)
def test_launch_script_is_the_golden_one(
    golden: str, cluster: str, launcher: Launcher, name: str, tmp_path: Path
) -> None:
    is_golden(bundle(cluster, launcher=launcher).files[name].decode(), golden, tmp_path)


@pytest.mark.parametrize(
    ("golden", "cluster", "name"),
    [
        ("two-nodes-ssh", "two-nodes", "launch.sh"),
        ("two-nodes-ssh-ranks", "two-nodes", "launch-ranks.sh"),
        ("one-node-ssh", "one-node", "launch.sh"),
    ],
)
def test_ssh_in_place_of_deepspeeds_launcher(golden: str, cluster: str, name: str, tmp_path: Path) -> None:
    files = bundle(cluster, "launch.launcher=ssh").files
    is_golden(files[name].decode(), golden, tmp_path)
    assert ("launch-ranks.sh" in files, "deepspeed_env" in files) == (cluster != "one-node", False)


def test_a_restart_over_ssh_starts_the_ranks_from_the_runs_own_checkpoints() -> None:
    files = {name: text.decode() for name, text in bundle("two-nodes", "launch.launcher=ssh").files.items()}
    load = f" \\\n  --load /workspace/runs/{RUN_ID}/checkpoints\n"
    assert files["launch-resume.sh"] == files["launch.sh"].replace("launch-ranks.sh", "launch-resume-ranks.sh")
    assert files["launch-resume-ranks.sh"] == files["launch-ranks.sh"].rstrip() + load
    assert Supervision.from_json(files["supervision.json"]).remote == ("node-2",)


def is_golden(script: str, golden: str, tmp_path: Path) -> None:
    assert script == (GOLDEN / f"{golden}.sh").read_text()
    file = tmp_path / "launch.sh"
    file.write_text(script)
    subprocess.run(["shellcheck", str(file)], check=True)


def test_files_of_the_folder() -> None:
    made = bundle("chosen-slots")
    assert made.path == f"/workspace/runs/{RUN_ID}"
    assert made.files["hostfile"].decode() == "gpu-1 slots=6\ngpu-2 slots=6\n"
    assert made.files["deepspeed_env"].decode().splitlines() == [
        "DEEPSPEED_TIMEOUT=10080", "NCCL_DEBUG=INFO", "GREETING=it's two words", f"TRIDOCK_RUN_ID={RUN_ID}",
        "TRIDOCK_WORLD_SIZE=4",
    ]  # fmt: skip
    assert json.loads(made.files["manifest.json"]) == {"image": "sha256:1", "run_id": RUN_ID}
    assert json.loads(made.files["ds_config.json"])["train_batch_size"] == 4
    assert json.loads(made.files["plan.json"])["world_size"] == 4


def test_what_the_supervisor_has_to_know() -> None:
    made = bundle("two-nodes", "restart.max=3", "restart.window=1h", "launch.hang_timeout=60", "restart.min_nodes=2")
    assert Supervision.from_json(made.files["supervision.json"].decode()) == Supervision(
        head="node-1",
        ranks={"node-1": (0, 1), "node-2": (2, 3)},
        remote=("node-2",),
        master_port=29500,
        hang_timeout_s=60.0,
        max_restarts=3,
        restart_window_s=3600.0,
        checkpoints=f"/workspace/runs/{RUN_ID}/checkpoints",
        node_timeout_s=60.0,
        min_nodes=2,
        master_addr="node-1",
        launcher="ssh",
        reach=Ssh.reach,
    )


def test_a_restart_loads_the_runs_own_checkpoints() -> None:
    files = bundle("two-nodes").files
    load = f" \\\n  --load /workspace/runs/{RUN_ID}/checkpoints\n"
    assert files["launch-resume.sh"].decode() == files["launch.sh"].decode().rstrip() + load
    files = bundle("two-nodes", "train.save=false").files
    assert "launch-resume.sh" not in files
    assert Supervision.from_json(files["supervision.json"].decode()).checkpoints is None


def test_a_restart_of_megatron_loads_them_with_its_own_options() -> None:
    fields = ["engine=megatron-deepspeed", "data.vocab_file=v", "data.merge_file=m", "precision=fp32"]
    files = bundle("one-node", *fields, "train.load=runs/old/checkpoints", "train.checkpoint_folder=kept").files
    launch, resume = files["launch.sh"].decode(), files["launch-resume.sh"].decode()
    assert resume == launch.replace("--load /workspace/runs/old/checkpoints", "--load /workspace/kept")
    folder = Supervision.from_json(files["supervision.json"].decode()).checkpoints
    assert folder == "/workspace/kept"


def test_nodes_that_are_started_by_hand_are_not_reached_by_ssh() -> None:
    files = bundle("two-nodes", launcher=Local()).files
    assert Supervision.from_json(files["supervision.json"].decode()).watched == ("node-1",)


def test_the_experiment_in_the_folder_is_resolved() -> None:
    made = bundle("two-nodes", "batch.global_batch_size=null")
    assert parse_experiment(made.files["experiment.yaml"].decode(), "kept").batch.global_batch_size == 4


def test_ddp_needs_no_deepspeed_configuration() -> None:
    assert "ds_config.json" not in bundle("one-node", "parallel.strategy=ddp").files


def test_ports_of_runs_differ_and_stay_below_the_ephemeral_range() -> None:
    ports = {default_port(f"tiny-20260102-030405-{n:04x}") for n in range(200)}
    assert len(ports) > 190
    assert all(20000 <= port < 30000 for port in ports)
