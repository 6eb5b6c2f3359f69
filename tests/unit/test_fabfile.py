"""The tasks as a user types them: parsing, messages and exit codes that need no host."""

import importlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from invoke import Collection, Program

import fabfile

ROOT = Path(__file__).parents[2]
TASKS = (
    "check",
    "data",
    "down",
    "fetch",
    "keys",
    "launch",
    "logs",
    "plan",
    "report",
    "reproduce",
    "runs",
    "status",
    "stop",
    "triage",
    "up",
)


def fab(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("fab"))
    argv = [program, "--search-root", str(ROOT), *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_every_task_is_listed() -> None:
    listed = [line.split()[0] for line in fab("--list").stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert tuple(listed) == TASKS


def fab_here(*arguments: str) -> int:
    """The same in this process, which takes a tenth of the time; its exit code. What it says, ``capfd`` has."""
    try:
        # Loaded anew: a task gives away the texts of its flags when it is first asked for them.
        Program(namespace=Collection.from_module(importlib.reload(fabfile))).run(["fab", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("task", TASKS)
def test_every_flag_is_explained(task: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here(task, "--help") == 0
    shown = capfd.readouterr().out
    flags = [line.strip() for line in shown.split("Options:")[1].splitlines() if line.strip().startswith("-")]
    assert flags
    assert all(len(flag.split(None, 1)) == 2 for flag in flags), flags


@pytest.mark.parametrize("task", TASKS)
def test_hosts_are_required(task: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here(task) == 2
    done = capfd.readouterr()
    assert done.out == ""
    assert done.err == "--hosts: is missing; give a DeepSpeed hostfile, for example hostfiles/lab\n"


@pytest.mark.parametrize("task", TASKS)
def test_a_missing_hostfile_is_never_a_local_run(task: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here(task, "--hosts", "nowhere/lab") == 2
    assert capfd.readouterr().err == (
        "nowhere/lab: the hostfile is missing; got no such file; give the path of a hostfile; "
        "a run never falls back to this machine alone\n"
    )


def test_a_dry_run_shows_the_command_and_every_file_and_touches_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=2\ngpu-2 slots=2\n")
    config = str(ROOT / "configs" / "demo.yaml")
    monkeypatch.chdir(tmp_path)
    assert fab_here("launch", "--hosts", str(tmp_path / "lab"), "--config", config, "--dry-run") == 0
    stdout = capfd.readouterr().out
    shown = [line.removeprefix("# ") for line in stdout.splitlines() if line.startswith("# ")]
    files = [
        "experiment.yaml",
        "plan.json",
        "manifest.json",
        "hostfile",
        "deepspeed_env",
        "launch.sh",
        "ds_config.json",
    ]
    assert [line for line in shown if line in files] == files
    assert "--master_addr gpu-1 " in stdout
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]


def _lab(folder: Path, gpu: str) -> str:
    (folder / "lab").write_text("".join(f"gpu-{number} slots=4\n" for number in range(4)))
    (folder / "lab.yaml").write_text(f"gpu: {gpu}\n")
    return str(folder / "lab")


def test_a_launch_that_does_not_fit_is_refused_unless_forced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "jean-zay" / "7.5b.yaml")
    arguments = ("launch", "--hosts", _lab(tmp_path, "8gib"), "--config", config, "--dry-run")
    assert fab_here(*arguments) == 2
    assert capfd.readouterr() == (
        "",
        f"{config}: a rank of stage 0 needs more memory than the 8.0 GiB of a 8gib; got 10.0 GiB; "
        "see `tridock plan --search` for layouts that fit, or start it all the same with --force\n",
    )
    assert fab_here(*arguments, "--force") == 0
    shown = capfd.readouterr().out.split("# plan.json\n")[1].split("\n# ")[0]
    plan = json.loads(shown)
    assert (plan["verdict"], plan["world_size"]) == ("no-fit", 16)
    assert len(plan["memory"]["stages"]) == 4


def test_a_plan_of_a_cluster_whose_gpu_is_named_contacts_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "jean-zay" / "7.5b.yaml")
    arguments = ("plan", "--hosts", _lab(tmp_path, "v100-16gb"), "--config", config)
    assert fab_here(*arguments, "--json") == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "tight"
    assert fab_here(*arguments) == 0
    assert "TP4 PP4 DP1: 16 ranks on 4 nodes" in capfd.readouterr().out
    assert fab_here(*arguments, "--search") == 0
    assert "best first" in capfd.readouterr().out
    assert fab_here(*arguments, "--tokens", "many") == 2
    assert capfd.readouterr().err == "--tokens: is not a number; got 'many'; write it as in 300e9\n"


def test_a_plan_is_made_without_a_host_that_does_not_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "lab").write_text("127.0.0.1 slots=2\n")
    (tmp_path / "lab.yaml").write_text(f"ssh: {{port: {port}, retries: 0, connect_timeout: 2}}\n")
    assert fab_here("plan", "--hosts", str(tmp_path / "lab"), "--json") == 0
    done = capfd.readouterr()
    assert done.err.startswith("127.0.0.1: ")
    assert json.loads(done.out)["memory"]["gpu"] is None


def test_a_check_wants_an_experiment_before_it_changes_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here("check", "--hosts", "hostfiles/twin", "--set", "train.seed=7") == 2
    assert capfd.readouterr().err == "--set: changes an experiment, and none is named; name one with --config\n"


def test_all_problems_of_an_experiment_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=3\n")
    arguments = [
        f"--set={field}" for field in ("model.num_attention_heads=3", "batch.global_batch_size=8", "optimizer.min_lr=1")
    ]
    assert fab_here("launch", "--hosts", str(tmp_path / "lab"), "--dry-run", *arguments) == 2
    assert capfd.readouterr().err.splitlines() == [
        "configs/demo.yaml: model.num_attention_heads: must divide hidden_size 256; got 3; "
        "use 2 or 4, or set model.kv_channels",
        "configs/demo.yaml: batch.global_batch_size: must be a multiple of micro_batch_size 4 x data parallel size 3; "
        "got 8; use 12, or leave it out",
        "configs/demo.yaml: optimizer.min_lr: must not exceed lr 0.001; got 1; lower it",
    ]


def test_status_with_no_host_that_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "lab").write_text("gpu-1 slots=4\n")
    (tmp_path / "ssh_config").write_text(f"Host gpu-1\n  HostName 127.0.0.1\n  Port {port}\n")
    (tmp_path / "lab.yaml").write_text(f"ssh: {{config_file: {tmp_path}/ssh_config, retries: 0}}\n")
    done = fab("status", "--hosts", str(tmp_path / "lab"))
    assert [cell.strip() for cell in done.stdout.split("│")[1:-1]] == ["gpu-1", "4", "unreachable", ""]
    assert done.stderr == (
        f"gpu-1: nothing listens at 127.0.0.1 port {port}; got connection refused; "
        "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)\n"
    )
    assert done.returncode == 3
