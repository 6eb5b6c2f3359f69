"""What a launch writes on each node, and what it leaves there if it fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tridock
from tests.unit.ops.conftest import Lab
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.run_state import LOCK
from tridock.contracts.supervision import Supervision
from tridock.errors import ClusterError, Problem
from tridock.experiment.command import CommandExperiment
from tridock.launchers.bundle import RunBundle
from tridock.ops.runs import command, start_on_nodes
from tridock.ops.runs.code import read_code
from tridock.ops.runs.start import put_files


def test_a_node_gets_its_own_script_and_the_head_all() -> None:
    ranks = {"a": (0,), "b": (1,), "c": (2,)}
    files = {"supervision.json": Supervision("a", ranks, ("b", "c"), 20000, 30.0).to_json().encode(), "launch.sh": b""}
    files |= {f"{script}-node-{rank}.sh": b"" for script in ("launch", "launch-resume") for rank in range(3)}
    put: dict[str, set[str]] = {}

    def each(write: Any) -> None:
        for node in (*ranks, "spare"):

            def put_tree(files: Mapping[str, bytes], folder: str, mode: int, node: str = node) -> None:
                assert (folder, mode) == (f"/{node}/runs/demo", 0o644)
                put[node] = set(files)

            write(node, SimpleNamespace(put_tree=put_tree))

    session: Any = SimpleNamespace(head="a", each=each, workspace=lambda node: f"/{node}")
    put_files(session, RunBundle("demo", "/workspace/runs/demo", Command.of("true"), files))
    common = {"supervision.json", "launch.sh"}
    assert put == {
        "a": set(files),
        "b": common | {"launch-node-1.sh", "launch-resume-node-1.sh"},
        "c": common | {"launch-node-2.sh", "launch-resume-node-2.sh"},
        "spare": common,
    }


@pytest.fixture
def program(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> RunBundle:
    """A run of train.py; the verbs of a node run here, and see the workspace that the node would."""

    def inside(node: str, *argv: str, stdin: bytes | None = None, **_: object) -> Command:
        own = (it.replace(run_folder.WORKSPACE, str(lab.workspace(node))) for it in argv[1:])
        return Command.of("env", f"PYTHONPATH={Path(tridock.__file__).parents[1]}", sys.executable, *own, stdin=stdin)

    monkeypatch.setattr(lab.session, "inside", inside)
    lab.write("code/train.py", b"print(1)")
    ranks = {"node-1": (0,), "node-2": (1,)}
    files = {"supervision.json": Supervision("node-1", ranks, ("node-2",), 20000, 30.0).to_json().encode()}
    files |= {f"launch-node-{rank}.sh": b"" for rank in range(2)}
    files[run_folder.CODE_INDEX] = read_code(lab.project / "code").index.encode()
    return RunBundle("demo", "/workspace/runs/demo", Command.of("true"), files)


def test_a_programs_files_and_code_take_one_command_where_the_code_is_known(
    lab: Lab, program: RunBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, ran = read_code(lab.project / "code"), list[str]()

    def counted(node: str, host: Any) -> None:
        pipe = host.pipe  # what host.run calls too
        monkeypatch.setattr(host, "pipe", lambda *args, **rest: (ran.append(node), pipe(*args, **rest))[1])

    command._put_files(lab.session, code, program)
    lab.session.each(counted)
    for node, script in (("node-1", {"launch-node-0.sh", "launch-node-1.sh"}), ("node-2", {"launch-node-1.sh"})):
        run = lab.workspace(node) / "runs/demo"
        assert (run / run_folder.CODE_COPY / "train.py").read_bytes() == b"print(1)"
        assert {it.name for it in run.glob("launch-*")} == script
        (run / run_folder.CODE_COPY / "train.py").unlink()
    command._put_files(lab.session, code, program)
    assert (lab.workspace("node-2") / "runs/demo" / run_folder.CODE_COPY / "train.py").read_bytes() == b"print(1)"
    assert sorted(ran) == ["node-1", "node-2"]


def test_a_run_folder_that_cannot_be_written_is_named(lab: Lab, program: RunBundle) -> None:
    (lab.workspace("node-2") / "runs").mkdir(parents=True)
    (lab.workspace("node-2") / "runs/demo").write_text("a file")
    with pytest.raises(ClusterError) as caught:
        command._put_files(lab.session, read_code(lab.project / "code"), program)
    folder = lab.workspace("node-2") / "runs/demo"
    assert str(caught.value).startswith(
        f"node-2: `write into {folder}` failed with exit code 3; got {folder}: File exists;"
    )


def launch_of(lab: Lab, program: RunBundle) -> None:
    code = read_code(lab.project / "code")
    experiment = CommandExperiment(name="demo", engine="command", command=("python", "train.py"))
    put = lambda bundle: command._put_files(lab.session, code, bundle)  # noqa: E731
    options: Any = {"check": False, "share": True, "queue": False, "approve": None}
    start_on_nodes.start_on_nodes(lab.session, experiment, lambda: None, lambda *_: program, put, **options)


@pytest.mark.parametrize("failure", [ClusterError(Problem("node-1", "does not answer", "", "")), KeyboardInterrupt()])
@pytest.mark.parametrize("reached", ["", "started", "queued"])
def test_a_launch_that_fails_removes_its_files_unless_the_run_has_started(
    lab: Lab,
    program: RunBundle,
    failure: BaseException,
    reached: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [lab.workspace(node) / "runs/demo" for node in lab.session.nodes]

    def start(*_: object, **__: object) -> RunBundle:
        assert all((folder / run_folder.CODE_COPY / "train.py").is_file() for folder in folders)
        if reached == "started":
            (folders[0] / LOCK).touch()
        if reached == "queued":
            ticket = folders[0].parent / run_folder.QUEUE / "00000000-demo.json"
            ticket.parent.mkdir()
            ticket.write_text('{"run_id": "demo"}')
        raise failure

    monkeypatch.setattr(start_on_nodes, "ensure_up", lambda _: "id")
    monkeypatch.setattr(start_on_nodes, "start", start)
    with pytest.raises(type(failure)):
        launch_of(lab, program)
    assert [folder.exists() for folder in folders] == [bool(reached)] * 2
    expected = "run demo has started, or is queued; see tridock status\n" if reached else ""
    assert capsys.readouterr().err == expected
