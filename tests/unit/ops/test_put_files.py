"""What a launch writes on each node, and what it leaves there if it fails."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tridock
from tests.unit.ops.conftest import Lab
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.run_state import LOCK, RunState
from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment.command import CommandExperiment
from tridock.launchers.run import RunBundle
from tridock.launchers.ssh import Ssh
from tridock.node.agent.code import receive_files
from tridock.node.queue import enqueue
from tridock.node.supervisor import process
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs import launch as launches
from tridock.ops.runs.cluster_runs import list_runs
from tridock.ops.runs.code import ARCHIVE_END, archive_member, archive_of
from tridock.ops.runs.launch import preview, put_files
from tridock.ops.runs.prepared import Prepared, prepare_command
from tridock.ops.runs.provenance import operator


@pytest.fixture
def program(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """A run of train.py; the verbs of a node run here, and see the workspace that the node would."""

    def inside(node: str, *argv: str, stdin: bytes | None = None, **_: object) -> Command:
        own = [it.replace(run_folder.WORKSPACE, str(lab.workspace(node))) for it in argv[1:]]
        own += ["--workspace", str(lab.workspace(node))] if argv[-1] == "runs" else []
        return Command.of("env", f"PYTHONPATH={Path(tridock.__file__).parents[1]}", sys.executable, *own, stdin=stdin)

    monkeypatch.setattr(lab.client, "inside", inside)
    lab.write("code/train.py", b"print(1)")
    experiment = CommandExperiment(name="demo", engine="command", command=("python", "train.py"), code="code")
    return prepare_command(experiment, lab.project, lab.hosts.cluster.slots, Ssh(), "demo")


@pytest.fixture
def no_checks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on nodes that are up."""
    monkeypatch.setattr(launches, "ensure_up", lambda client: ("id", client))
    monkeypatch.setattr(launches, "kept_up", lambda *_: nullcontext((None, lab.client)))


def test_a_programs_files_and_code_take_one_command_where_the_code_is_known(
    lab: Lab, program: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, ran = preview(lab.hosts.cluster, program), list[str]()

    def counted(node: str, host: Any) -> None:
        pipe = host.pipe  # what host.run calls too
        monkeypatch.setattr(host, "pipe", lambda *args, **rest: (ran.append(node), pipe(*args, **rest))[1])

    put_files(lab.client, bundle, program.code)
    lab.hosts.each(counted)
    for node in lab.hosts:
        run = lab.workspace(node) / "runs/demo"
        assert (run / run_folder.CODE_COPY / "train.py").read_bytes() == b"print(1)"
        assert {it.name for it in run.glob("launch-*")} == {"launch-node-0.sh", "launch-node-1.sh"}
        (run / run_folder.CODE_COPY / "train.py").unlink()
    put_files(lab.client, bundle, program.code)
    assert (lab.workspace("node-2") / "runs/demo" / run_folder.CODE_COPY / "train.py").read_bytes() == b"print(1)"
    assert sorted(ran) == ["node-1", "node-2"]


def test_an_engines_run_has_no_code(lab: Lab, program: Prepared) -> None:
    files = {
        "supervision.json": preview(lab.hosts.cluster, program).files["supervision.json"],
        "launch.sh": b"exec true",
    }
    put_files(lab.client, RunBundle("demo", "/workspace/runs/demo", Command.of("true"), files), None)
    for node in lab.hosts:
        found = {name.removeprefix("runs/demo/"): content for name, content in lab.below(node).items()}
        assert found == {run_folder.INCOMPLETE: b"", **files}


def test_a_run_folder_that_cannot_be_written_is_named(lab: Lab, program: Prepared) -> None:
    (lab.workspace("node-2") / "runs").mkdir(parents=True)
    (lab.workspace("node-2") / "runs/demo").write_text("a file")
    with pytest.raises(ClusterError) as caught:
        put_files(lab.client, preview(lab.hosts.cluster, program), program.code)
    folder = lab.workspace("node-2") / "runs/demo"
    assert str(caught.value).startswith(
        f"node-2: `write into {folder}` failed with exit code 3; got {folder}: File exists;"
    )


@pytest.mark.usefixtures("no_checks")
@pytest.mark.parametrize("failure", [ClusterError(Problem("node-1", "does not answer", "", "")), KeyboardInterrupt()])
@pytest.mark.parametrize("reached", ["", "started", "queued"])
def test_a_launch_that_fails_removes_its_files_unless_the_run_has_started(
    lab: Lab,
    program: Prepared,
    failure: BaseException,
    reached: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [lab.workspace(node) / "runs/demo" for node in lab.hosts]

    def start(*_: object, **__: object) -> RunBundle:
        assert all((folder / run_folder.CODE_COPY / "train.py").is_file() for folder in folders)
        if reached == "started":
            (folders[0] / LOCK).touch()
        if reached == "queued":
            ticket = folders[0].parent / run_folder.QUEUE / "00000000-demo.json"
            ticket.parent.mkdir()
            ticket.write_text('{"run_id": "demo"}')
        raise failure

    monkeypatch.setattr(launches, "start", start)
    with pytest.raises(type(failure)):
        launches.launch(lab.client, program, check=False, share=True)
    assert [folder.exists() for folder in folders] == [bool(reached)] * 2
    expected = "run demo has started, or is queued; see tridock status\n" if reached else ""
    assert capsys.readouterr().err == expected


@pytest.mark.usefixtures("no_checks")
def test_a_launch_that_was_killed_leaves_nothing_that_could_start(
    lab: Lab, program: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, cut, later = (replace(program, run_id=f"demo-20260101-00000{number}-0a1b") for number in range(3))

    def kill(*_: object) -> None:
        raise ClusterError(Problem("node-1", "is gone", "", ""))  # put_files() clears nothing up, as a killed process

    monkeypatch.setattr(launches, "archive_of", kill)
    with pytest.raises(ClusterError):
        put_files(lab.client, preview(lab.hosts.cluster, killed), killed.code)
    receive_files(
        lab.workspace("node-2") / "runs" / cut.run_id,
        io.BytesIO(archive_member(run_folder.INCOMPLETE, b"") + ARCHIVE_END),
    )
    assert [(run.run_id, run.state) for run in list_runs(lab.client)] == [
        (killed.run_id, RunState.INCOMPLETE),
        (cut.run_id, RunState.INCOMPLETE),
    ]
    folder = lab.workspace("node-1") / "runs" / killed.run_id
    with pytest.raises(RequestError) as refused:
        process.start(folder, again=True)
    what = f"{killed.run_id}: was never started; got its launch was interrupted; begin anew: tridock run"
    assert str(refused.value) == what

    def start(client: NodeClient, _lock: object, bundle: RunBundle, *_: object, queue: bool) -> RunBundle:
        enqueue(lab.workspace("node-1") / "runs" / bundle.run_id)
        return bundle

    monkeypatch.setattr("tridock.node.queue._start_next", lambda _: None)
    monkeypatch.setattr(launches, "start", start)
    monkeypatch.setattr(launches, "archive_of", archive_of)
    launches.launch(lab.client, later, check=False, share=True)
    by = f"started by {operator()}: its launch was interrupted"
    assert capsys.readouterr().err.splitlines() == [
        f"removed {killed.run_id}, {by}",
        f"removed {cut.run_id}: its launch was interrupted",
    ]
    assert [(run.run_id, run.state) for run in list_runs(lab.client)] == [(later.run_id, RunState.READY)]
