"""Your own program under a launcher that is not Tridock's: one cause and one exit code, however soon a rank fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import thinned
from tests.distributed.ranks import ROOT, free_port, rank_environment
from tests.distributed.supervised import Run
from tests.patience import STEP_S, WORK_S
from tridock.contracts import environment, run_folder
from tridock.contracts.run_state import exit_code_of
from tridock.experiment import CommandExperiment
from tridock.launchers.local import Local
from tridock.launchers.run import Run as Prepared
from tridock.launchers.run import make_bundle
from tridock.launchers.self_launchers import Per
from tridock.node.agent.evidence import evidence
from tridock.node.agent.processes import stop_processes
from tridock.triage import diagnose, facts_of

pytestmark = pytest.mark.distributed

TIMES = 3
HERE = "here"
PROGRAM = """import os, signal, sys, time
if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    {fault}
time.sleep(9999)
"""
# A program that starts its node's ranks itself, and ends them as soon as one has failed.
STARTER = """import os, signal, subprocess, sys, time
env = {"WORLD_SIZE": os.environ["NPROC_PER_NODE"]}
argv = [sys.executable, "train.py"]
ranks = [subprocess.Popen(argv, env={**os.environ, **env, "RANK": str(n)}) for n in range(int(env["WORLD_SIZE"]))]
while all(rank.poll() is None for rank in ranks):
    time.sleep(0.01)
failed = [rank.poll() is not None for rank in ranks].index(True)
for rank in ranks:
    rank.terminate()
codes = [rank.wait() for rank in ranks]
print(f"RuntimeError: my launcher has lost rank {failed}: {codes}", file=sys.stderr)
sys.exit(1)
"""
FAULTS = {
    "raises": ('raise ValueError("rank 1 has no data")', "exited with code 1", "ValueError: rank 1 has no data"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL", "was ended by SIGKILL"),
    "leaves": ("os._exit(3)", "exited with code 3", "exited with code 3"),
}
CASES = [f"{launcher} {fault}" for launcher in ("torchrun", "deepspeed") for fault in FAULTS]
MPIRUN = ("mpirun", "--oversubscribe", "--bind-to", "none", sys.executable, "train.py")


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for folder in (tmp_path / "runs").glob("*"):
        stop_processes(folder.name, grace_s=0.0)


def prepared(workspace: Path, command: tuple[str, ...], program: str, per: Per | None = None, node: str = HERE) -> Run:
    """A run of two ranks on this machine, as `tridock run` prepares it."""
    experiment = CommandExperiment(name="own", engine="command", command=command, per=per)
    run_id = run_folder.new_run_id("own")
    run = Prepared(experiment, {node: (0, 1)}, run_id, master_port=free_port(), workspace=str(workspace))
    folder = Path(run.path)
    for name, content in make_bundle(run, Local(python=sys.executable, library=str(ROOT))).files.items():
        run_folder.write_atomic(folder / name, content)
    (folder / run_folder.CODE_COPY).mkdir()
    (folder / run_folder.CODE_COPY / "train.py").write_text(program)
    (folder / run_folder.CODE_COPY / "starter.py").write_text(STARTER)
    return Run(folder)


def start(run: Run, node: str = HERE) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    arguments = [sys.executable, "-m", "tridock.node", "start", str(run.folder)]
    subprocess.run(
        arguments, env=rank_environment() | {"PATH": path, environment.NODE: node}, cwd=ROOT, check=True, timeout=STEP_S
    )


@pytest.mark.parametrize("case", thinned(CASES, ("torchrun raises",)))
def test_a_rank_that_fails_at_once_is_the_cause_each_time(workspace: Path, case: str) -> None:
    launcher, _, fault = case.partition(" ")
    does, how, said = FAULTS[fault]
    found = []
    for _ in range(TIMES):
        run = prepared(workspace, (launcher, "train.py"), PROGRAM.format(fault=does))
        start(run)
        run.until(lambda folder=run.folder: exit_code_of(folder) is not None, WORK_S)  # type: ignore[misc]
        facts = facts_of({"here": evidence(run.folder)}, "here", exit_code_of(run.folder))
        found.append((facts.exit_code, facts.who, facts.reason, f"tridock: rank 1 on here {how}" in run.log()))
        assert diagnose(facts).rule in ("program-failed", "exited-without-message"), run.log()
    assert found == TIMES * [(4, "rank 1 on here", said, True)], (run.log(), run.events())


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
@pytest.mark.parametrize("fault", thinned(FAULTS, ("raises",)))
def test_under_mpirun_too(workspace: Path, fault: str) -> None:
    does, how, said = FAULTS[fault]
    run = prepared(workspace, MPIRUN, PROGRAM.format(fault=does), node="localhost")
    start(run, "localhost")
    run.until(lambda: exit_code_of(run.folder) is not None, WORK_S)
    facts = facts_of({"localhost": evidence(run.folder)}, "localhost", exit_code_of(run.folder))
    assert (facts.exit_code, facts.who, facts.reason) == (4, "rank 1 on localhost", said), (run.log(), run.events())
    assert f"tridock: rank 1 on localhost {how}" in run.log()


def test_a_program_per_node_names_what_its_rank_printed_before_what_it_says_itself(workspace: Path) -> None:
    """Nothing records its ranks: the node alone is named where the agent has not seen the rank."""
    does, _, said = FAULTS["raises"]
    run = prepared(workspace, (sys.executable, "starter.py"), PROGRAM.format(fault=does), per="node")
    start(run)
    run.until(lambda: exit_code_of(run.folder) is not None, WORK_S)
    facts = facts_of({HERE: evidence(run.folder)}, HERE, exit_code_of(run.folder))
    assert (facts.exit_code, facts.reason) == (4, said), (run.log(), run.events())
    assert facts.who in ("rank 1 on here", "here")
