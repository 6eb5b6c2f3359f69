"""A run that is hit twice and continues each time ends with the losses of one that was left alone, to the last bit."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import (
    ROOT,
    Trained,
    events,
    losses,
    make_run,
    rank_environment,
    read_lines,
)
from tests.megatron_source import patched_source
from tests.patience import STEP_S, WORK_S
from tridock.contracts import environment, heartbeat
from tridock.data.corpus import prepare_demo
from tridock.node.agent.processes import find_processes

pytestmark = pytest.mark.distributed

ITERATIONS, INTERVAL = 240, 40
LENGTH = {
    "train.train_iters": ITERATIONS,
    "train.save": True,
    "train.save_interval": INTERVAL,
    "train.eval_interval": 30,
    "model.hidden_dropout": 0.1,
}
CORE = {"engine": "megatron-core", "parallel.use_distributed_optimizer": True}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"parallel.strategy": "zero", "parallel.zero_stage": 1},
    "megatron-core": CORE,
}


@pytest.fixture(scope="module")
def undisturbed(workspace: Path) -> Trained:
    folders = {name: make_run(workspace, f"calm-{name}", 2, **LENGTH, **fields) for name, fields in ENGINES.items()}
    return Trained(*((2, {name: folder}) for name, folder in folders.items()))


HELD = """
import os, time
from pathlib import Path
if "RANK" in os.environ:
    from tridock.contracts import heartbeat
    beat = heartbeat.beat
    def held(phase, iteration=None, **rest):
        beat(phase, iteration, **rest)
        while (iteration or 0) >= {iteration} and not Path(__file__).with_name("go").exists():
            time.sleep(0.01)
    heartbeat.beat = held
"""
"""Python's start in a rank, which then goes no further than that iteration until it may: it is there to be killed."""


class Training:
    """`tridock train` of an experiment, beside the test."""

    def __init__(
        self, workspace: Path, experiment: Path, *arguments: str, megatron: Path | None = None, held: int = 0
    ) -> None:
        """``held``: the iteration beyond which no rank goes before ``release``."""
        id_file = workspace / f"id-{secrets.token_hex(4)}"
        argv = [sys.executable, "-m", "tridock.cli", "train", str(experiment), "--workspace", str(workspace)]
        argv += ["--nproc", "2", "--run-id-file", str(id_file), *arguments]
        env = rank_environment() | ({} if megatron is None else {environment.MEGATRON: str(megatron)})
        self.gate = workspace / f"gate-{id_file.name}"
        if held:
            self.gate.mkdir()
            (self.gate / "sitecustomize.py").write_text(HELD.format(iteration=held))
            env["PYTHONPATH"] = f"{self.gate}{os.pathsep}{env['PYTHONPATH']}"
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(argv, env=env, text=True, start_new_session=True, **pipe)  # type: ignore[call-overload]
        self.until(id_file.exists)
        self.folder = workspace / "runs" / id_file.read_text().strip()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever has gone wrong, nothing of the run is left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.communicate(timeout=STEP_S)

    def until(self, condition: Callable[[], object]) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < WORK_S
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.01)
        return time.monotonic() - began

    def kill(self, rank: int, beyond: int, saved: int = 0) -> None:
        """Once the rank has gone that far in this attempt, and the checkpoint of iteration ``saved`` is whole."""
        self.until(lambda: not saved or saved in self.saved_iterations())

        def is_there() -> bool:
            beat = heartbeat.read(self.folder, rank)
            return beat is not None and beat.phase == "train" and beat.iteration > beyond

        self.until(is_there)
        beat = heartbeat.read(self.folder, rank)
        assert beat is not None
        os.kill(beat.pid, signal.SIGKILL)

    def release(self) -> None:
        (self.gate / "go").touch()

    def saved_iterations(self) -> list[int]:
        path = self.folder / "events.jsonl"
        return [e["iteration"] for e in read_lines(path) if e["event"] == "checkpoint_saved"] if path.exists() else []

    def restarts(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [e for e in read_lines(path) if e["event"] == "run_restarted"] if path.exists() else []


@pytest.mark.full  # test_rehearse.py: a lost rank changes no loss
@pytest.mark.parametrize("engine", ENGINES)
def test_two_deaths_change_no_loss(workspace: Path, undisturbed: Trained, engine: str) -> None:
    with Training(workspace, undisturbed[engine] / "experiment.yaml", "--set", "restart.max=2", held=200) as run:
        run.kill(1, beyond=INTERVAL + 5, saved=INTERVAL)
        run.until(lambda: len(run.restarts()) == 1)
        run.kill(0, beyond=2 * INTERVAL + 5, saved=2 * INTERVAL)
        overhead = run.until(lambda: len(run.restarts()) == 2)
        run.release()
        output = run.process.communicate(timeout=WORK_S)[0]
    assert run.process.returncode == 0, output
    assert losses(run.folder) == losses(undisturbed[engine])
    lines = read_lines(run.folder / "metrics.jsonl")
    assert len(lines) == len(losses(run.folder))  # none stands there twice
    first, second = run.restarts()
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert first["iteration"] % INTERVAL == second["iteration"] % INTERVAL == 0
    assert first["iteration"] >= INTERVAL
    assert second["iteration"] >= 2 * INTERVAL
    loaded = [e["iteration"] for e in read_lines(run.folder / "events.jsonl") if e["event"] == "checkpoint_loaded"]
    assert loaded == [first["iteration"], second["iteration"]]
    assert events(run.folder)[-1] == "run_finished"
    print(f"{engine}: from the death to the next start {overhead:.1f} s")
    assert find_processes(run.folder.name) == []
    launch, resume = ((run.folder / name).read_text() for name in ("launch.sh", "launch-resume.sh"))
    assert resume == f"{launch.rstrip()} \\\n  --load {run.folder}/checkpoints\n"


def test_a_death_changes_no_loss_of_megatron_v115(tmp_path: Path) -> None:
    """In TP1 PP2, with DeepSpeed's checkpoints."""
    megatron = patched_source(tmp_path / "megatron")
    prepare_demo(tmp_path / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=1_000_000)
    experiment = ROOT / "configs" / "megatron" / "tiny-345m.yaml"
    fields = {
        "parallel": "{pipeline_model_parallel_size: 2, zero_stage: 0}",
        "train.train_iters": 120,
        "train.log_interval": 1,
        "train.save_interval": 20,
        "restart.max": 1,
    }
    arguments = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    with Training(tmp_path, experiment, *arguments, "--set", "name=calm", megatron=megatron) as calm:
        output = calm.process.communicate(timeout=WORK_S)[0]
    assert calm.process.returncode == 0, output
    with Training(tmp_path, experiment, *arguments, megatron=megatron, held=100) as run:
        run.kill(1, beyond=45, saved=40)
        run.release()
        output = run.process.communicate(timeout=WORK_S)[0]
    assert run.process.returncode == 0, output
    (restarted,) = run.restarts()
    assert restarted["iteration"] in range(40, 120, 20)
    assert losses(run.folder) == losses(calm.folder)
    assert len(read_lines(run.folder / "metrics.jsonl")) == len(read_lines(calm.folder / "metrics.jsonl"))
    assert find_processes(run.folder.name) == []


ENDLESS = ("--set", "train.train_iters=1000000", "--set", "train.log_interval=100")


@pytest.mark.full  # test_several_nodes.py: Ctrl-C; test_run_supervisor.py: a stop
def test_ctrl_c_is_no_failure_to_recover_from(workspace: Path) -> None:
    experiment = make_run(workspace, "interrupted", 2, **LENGTH) / "experiment.yaml"
    with Training(workspace, experiment, *ENDLESS, "--set", "restart.max=2") as run:
        run.until(lambda: (beat := heartbeat.read(run.folder, 0)) and beat.phase == "train")
        os.killpg(run.process.pid, signal.SIGINT)
        output = run.process.communicate(timeout=WORK_S)[0]
    assert run.process.returncode == 130, output
    assert (run.folder / "exit_code").read_text() == "143\n"
    assert run.restarts() == []
    assert find_processes(run.folder.name) == []


@pytest.mark.full  # tests/integration/test_faults.py: on two nodes
def test_a_dead_rank_is_named_in_the_verdict(workspace: Path) -> None:
    with Training(workspace, make_run(workspace, "dead", 2, **LENGTH) / "experiment.yaml", *ENDLESS) as run:
        run.kill(1, beyond=2)
        output = run.process.communicate(timeout=WORK_S)[0]
    assert run.process.returncode == 4
    last = next(line for line in output.splitlines() if ": the run failed; got " in line)
    text = "rank 1 on localhost was ended by SIGKILL after iteration "
    assert last.startswith(f"{run.folder.name}: the run failed; got exit code 4, {text}")
    assert last.endswith(f"; look at {run.folder}/logs/rank-1.log")
