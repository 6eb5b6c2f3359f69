"""`tridock train` started by hand on each of several nodes, with folders of their own or a shared one, without ssh."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.distributed.ranks import free_port, losses, make_data, make_run, metrics, rank_environment
from tests.patience import WORK_S
from tridock.contracts.checkpoints import LATEST

pytestmark = pytest.mark.distributed


def node(workspace: Path, experiment: Path, rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tridock.cli", "train", str(experiment), "--workspace", str(workspace)]
    argv += ["--nproc", "1", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1"]
    argv += ["--set", f"launch.master_port={port}", *arguments]
    return subprocess.Popen(argv, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def experiment_in(folder: Path, **fields: object) -> Path:
    make_data(folder)
    made = make_run(folder, "unused", 2, **fields)
    path = folder / "experiment.yaml"
    path.write_text((made / "experiment.yaml").read_text())
    return path


@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.full), False])
def test_two_nodes_are_one_run(tmp_path: Path, shared: bool) -> None:
    port = free_port()
    folders = [tmp_path / "a", tmp_path / ("a" if shared else "b")]
    experiments = [experiment_in(folder) for folder in dict.fromkeys(folders)]
    processes = [node(folders[rank], experiments[rank % len(experiments)], rank, port) for rank in (1, 0)]
    outputs = [process.communicate(timeout=WORK_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (run,) = [folder for folder in (folders[0] / "runs").iterdir() if (folder / "exit_code").exists()]
    assert (run / "exit_code").read_text() == "0\n"
    assert len(losses(run)) == len(metrics(run)) > 8
    other = folders[1] / "runs" / run.name
    assert (run / "logs" / "rank-0.log").is_file()
    assert (other / "logs" / "rank-1.log").is_file()
    assert "--node-rank 0" in (run / "launch.sh").read_text()
    assert "--node-rank 1" in (other / "launch-1.sh").read_text()
    assert yaml.safe_load((other / "experiment.yaml").read_text())["batch"]["global_batch_size"] == 8
    assert f"run {run.name}: 2 ranks on 2 nodes, this one is 1, TP1 PP1 DP2; folder {other}\n" in outputs[0]
    assert "\nhang limit: 30 s or 3 longest steps without progress; at first 1,800 s\n" in outputs[1]


def test_another_experiment_on_one_node_stops_both(tmp_path: Path) -> None:
    port = free_port()
    experiment = experiment_in(tmp_path)
    processes = [
        node(tmp_path, experiment, 0, port),
        node(tmp_path, experiment, 1, port, "--set", "train.seed=7"),
    ]
    outputs = [process.communicate(timeout=WORK_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    for output in outputs:
        assert output.splitlines()[-1].startswith("node 1: has another experiment than node 0; got ")
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["unused"]


@pytest.mark.full  # test_local_disks.py
def test_shards_on_disks_of_their_own(tmp_path: Path) -> None:
    port, folders = free_port(), [tmp_path / "a", tmp_path / "b"]
    changes = [f"--set={it}" for it in ("parallel.strategy=fsdp", "parallel.zero_stage=0", "train.save=true")]
    processes = [node(folder, experiment_in(folder), rank, port, *changes) for rank, folder in enumerate(folders)]
    outputs = [process.communicate(timeout=WORK_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (run,) = [it.name for it in (folders[0] / "runs").iterdir() if (it / "exit_code").exists()]
    saved = [folder / "runs" / run / "checkpoints" / "iter_0000008" for folder in folders]
    parts = [[it.name for it in folder.iterdir() if it.suffix == ".distcp"] for folder in saved]
    assert parts == [["__0_0.distcp"], ["__1_0.distcp"]]


@pytest.mark.full  # test_triage.py: a diverged run; tests/integration/test_runs_on_docker_hosts.py: the same
def test_a_failed_run_names_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / LATEST).write_text("global_step5")  # its pointer only: the launch reads no more
    experiment = experiment_in(tmp_path, **{"train.load": "lost"})
    argv = [sys.executable, "-m", "tridock.cli", "train", str(experiment), "--workspace", str(tmp_path), "--nproc", "2"]
    done = subprocess.run(argv, env=rank_environment(), capture_output=True, text=True, timeout=WORK_S, check=False)
    (run,) = [folder for folder in (tmp_path / "runs").iterdir() if folder.name != "unused"]
    assert done.returncode == 2
    last = next(line for line in done.stderr.splitlines() if ": the run failed; got " in line)
    assert last.startswith(
        f"{run.name}: the run failed; got exit code 2, every rank: train.load: there is no checkpoint in "
    )
    assert last.endswith(f"; look at {run}/logs/rank-0.log")


def test_ctrl_c_on_one_node_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    experiments = [experiment_in(tmp_path / name, **{"train.train_iters": 100_000}) for name in ("a", "b")]
    first, second = (node(tmp_path / name, experiments[rank], rank, port) for rank, name in enumerate(("a", "b")))
    assert first.stdout is not None
    for line in first.stdout:
        if "iteration" in line:
            break
    second.send_signal(signal.SIGINT)
    output = second.communicate(timeout=WORK_S)[0]
    assert second.returncode == 130, output
    assert "stopping run small-" in output
    # Both nodes are this machine here, so that the processes of both were found and stopped.
    first.communicate(timeout=WORK_S)
    assert first.returncode not in (0, None)
    # An agent leaves after the command that it was there for.
    deadline = time.monotonic() + WORK_S
    while left := [path for path in Path("/proc").iterdir() if path.name.isdecimal() and _names(path, tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _names(process: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
