"""``tridock runs``: its list of this machine and a cluster, and the runs that rm and prune choose."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tridock.cli.program import main
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts import client
from tridock.ops.runs import cluster_runs
from tridock.ops.runs.removal import named, prunable

NOW = datetime(2026, 2, 1, tzinfo=UTC)
RUN = RunInfo("a-20260101-000000-1234", RunState.DONE, 0, "20260101-000000", None, "a", (), 10, 1.0, 1.0)
FAILED = replace(RUN, run_id="b", state=RunState.FAILED, exit_code=4, created="20260131-000000")
RUNS = [
    replace(RUN, run_id="running", state=RunState.RUNNING, created="20250101-000000"),
    replace(RUN, run_id="elsewhere", state=RunState.LOST, has_processes=True, created="20250101-000000"),
    replace(RUN, run_id="ready", state=RunState.READY, created="20250101-000000"),
    RUN,
    FAILED,
]


@pytest.mark.parametrize(
    ("limits", "ids"),
    [
        ({"days": 14.0}, [RUN.run_id]),
        ({"days": 0.5}, [RUN.run_id, "b"]),
        ({"keep": 0}, [RUN.run_id, "b"]),
        ({"keep": 1}, [RUN.run_id]),
        ({"keep": 9}, []),
        ({"states": [RunState.FAILED]}, ["b"]),
        ({"states": [RunState.READY]}, ["ready"]),
        ({"days": 14.0, "states": [RunState.FAILED]}, []),
    ],
)
def test_what_is_pruned(limits: dict[str, object], ids: list[str]) -> None:
    given = {"days": None, "keep": None, "states": [], **limits}
    assert [run.run_id for run in prunable(RUNS, NOW, **given)] == ids  # type: ignore[arg-type]


def test_every_run_that_cannot_be_removed_is_named() -> None:
    assert named(RUNS, ["b", "b", "ready"]) == [FAILED, RUNS[2]]
    with pytest.raises(RequestError) as caught:
        named(RUNS, ["b", "c", "running", "elsewhere"])
    assert str(caught.value).splitlines() == [
        "c: is not a run of these; see tridock runs",
        "running: is running; tridock stop ends it",
        "elsewhere: is running; tridock stop ends it",
    ]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, code in enumerate(("0", "4", "0")):
        folder = tmp_path / f"runs/tiny-2026010{number + 1}-101010-aaa{number}"
        folder.mkdir(parents=True)
        (folder / "experiment.yaml").write_text("name: tiny\n")
        (folder / "manifest.json").write_text('{"started_by": "ada@desk"}')
        (folder / "exit_code").write_text(code)
        (folder / "checkpoint").write_bytes(bytes(1 << 16))
    return tmp_path / "runs"


def left(runs: Path) -> list[str]:
    return sorted(path.name[-4:] for path in runs.iterdir())


def test_the_list_of_this_machine(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--here", "--sizes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], [run["state"] for run in found["runs"]]) == (1, ["done", "failed", "done"])
    assert {run["started_by"] for run in found["runs"]} == {"ada@desk"}
    assert all(1 << 16 <= run["disk_bytes"] < 1 << 18 for run in found["runs"])


@pytest.fixture
def cluster(runs: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunInfo]:
    """A hostfile here, and the runs of its cluster: one that was fetched, and one that is only there."""
    (runs.parent / "hostfile").write_text("host-a slots=1\n")
    (runs / "tiny-20260102-101010-aaa1/slurm.json").write_text('{"job_id": "17"}')
    fetched = replace(RUN, run_id="tiny-20260101-101010-aaa0", created="20260101-101010", head="host-a")
    there = replace(fetched, run_id="only-0001", created="20260103-000000", metrics={"loss": float("nan")})
    monkeypatch.setattr(client, "reachable", lambda hosts: (SimpleNamespace(hosts=hosts), None))
    monkeypatch.setattr(cluster_runs, "list_runs", lambda _, *, sizes: [fetched, there])
    return [fetched, there]


def listed(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> list[tuple[str, list[str]]]:
    assert main(["runs", "--json", *options]) == code
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    return [(row["run_id"][-4:], row["where"]) for row in rows]


def test_one_list_of_the_cluster_this_machine_and_slurm(
    runs: Path, cluster: list[RunInfo], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [("aaa2", ["here"]), ("aaa1", ["slurm"])]
    everything = [here[0], ("0001", ["cluster"]), here[1], ("aaa0", ["cluster", "here"])]
    assert listed(capsys) == listed(capsys, "--hosts", "hostfile") == everything
    assert main(["runs"]) == 0
    rows = [line.split("│")[1:] for line in capsys.readouterr().out.splitlines()[3:-1]]
    assert [row[1].strip() for row in rows] == ["this machine", "host-a", "job 17", "host-a, this machine"]
    assert listed(capsys, "--here") == [*here, ("aaa0", ["here"])]
    # What cannot be asked is named, and hides nothing else.
    down = ClusterError(Problem("host-a", "its node is not running", "", "run tridock up"))

    def fail(*_: object, **__: object) -> None:
        raise down

    monkeypatch.setattr(cluster_runs, "list_runs", fail)
    assert main(["runs"]) == 3
    ended = capsys.readouterr()
    assert ("this machine" in ended.out, ended.err) == (True, f"{down}\n")
    (runs.parent / "hostfile").unlink()
    assert listed(capsys) == [*here, ("aaa0", ["here"])]


def test_nothing_is_removed_without_a_condition_or_a_yes(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    for words in (
        ["prune"], ["prune", "--keep", "-1"], ["prune", "--older-than", "nan"], ["prune", "--keep", "0"],
        ["rm", "tiny-20260101-101010-aaa0", "tiny"],
    ):  # fmt: skip
        assert main(["runs", "--here", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("runs prune: has no condition; ")
    assert said[3].startswith("--yes: is missing, and nobody can be asked; got 3 runs, ")
    assert main(["runs", "prune", "--here", "--keep", "0", "--dry-run"]) == 0
    assert left(runs) == ["aaa0", "aaa1", "aaa2"]


def test_scripts_read_what_is_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"tiny-2026010{it + 1}-101010-aaa{it}" for it in range(3)]
    said = {"version": 1, "removed": names, "dry_run": True, "problems": []}
    assert main(["runs", "--json", "prune", "--here", "--keep", "0", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == said
    assert main(["runs", "prune", "--here", "--older-than", "99999", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**said, "removed": [], "dry_run": False}
    assert main(["runs", "prune", "--here", "--keep", "0", "--json"]) == 2
    (refused,) = json.loads(capsys.readouterr().out)["problems"]
    assert refused["message"].startswith("--yes: is missing, and --json asks nobody; got 3 runs, ")
    assert main(["runs", "rm", names[1], "--here", "--json", "--yes"]) == 0
    assert json.loads(capsys.readouterr().out) == {**said, "removed": names[1:2], "dry_run": False}
    assert left(runs) == ["aaa0", "aaa2"]


def test_runs_are_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--here", "prune", "--state", "failed", "--yes"]) == 0
    assert left(runs) == ["aaa0", "aaa2"]
    assert main(["runs", "rm", "tiny-20260101-101010-aaa0", "--here", "--yes"]) == 0
    assert left(runs) == ["aaa2"]
    assert capsys.readouterr().out.count("removed 1 run\n") == 2
    assert main(["runs", "--here", "prune", "--older-than", "99999", "--yes"]) == 0
    assert capsys.readouterr().out == "no run to remove\n"
