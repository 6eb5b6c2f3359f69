"""The user's own program that has lost a node: a spare takes its place, or the reason why none can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.node.test_failover import asked, nodes, says, supervision_of  # noqa: F401  (a fixture)
from tridock.contracts import run_folder
from tridock.experiment.command import CommandExperiment
from tridock.launchers.command import CommandRun, make_command_bundle
from tridock.node.supervisor.failover import move

RUN_ID = "train-20260102-030405-abcd"
TORCHRUN = ("torchrun", "train.py")


def a_run(workspace: Path, command: tuple[str, ...] = TORCHRUN, **changes: Any) -> Path:
    slots = changes.get("slots", {"node-1": (0, 1), "node-2": (0, 1)})
    spares = {"node-3": (0,), "node-4": (0, 1, 2)}
    experiment = CommandExperiment(name="train", engine="command", command=command)
    run = CommandRun(experiment, slots, RUN_ID, "node-1", 29500, {}, spares=spares, workspace=str(workspace))
    folder = workspace / "runs" / RUN_ID
    folder.mkdir(parents=True)
    for name, content in make_command_bundle(run).files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_spare_with_its_slots_takes_the_place_of_a_lost_node(
    tmp_path: Path,
    nodes: Path,  # noqa: F811
) -> None:
    folder = a_run(tmp_path)
    says(nodes, "node-3", {}, {})
    says(nodes, "node-4", {}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert moved.reason == "node-4 takes the place of node-2"
    assert moved.supervision == supervision_of(folder)
    assert dict(moved.supervision.ranks) == {"node-1": (0, 1), "node-4": (2, 3)}
    assert (moved.supervision.remote, dict(moved.supervision.spares)) == (("node-4",), {"node-3": (0,)})
    assert (folder / "hostfile").read_text() == "node-1 slots=2\nnode-4 slots=2\n"
    assert [rank["node"] for rank in json.loads((folder / "plan.json").read_text())["ranks"]] == [
        *("node-1", "node-1", "node-4", "node-4")
    ]
    assert asked(nodes, "node-4") == ["spare-status", "spare-status --reserve", "receive-files"]
    assert "node-2" in (folder / "before-1" / run_folder.HOSTFILE).read_text()
    assert "node-2" not in "".join(
        path.read_text() for path in folder.glob("*") if path.is_file() and "events" not in path.name
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"slots": {"node-1": (0, 1), "node-2": (0, 1, 2, 3)}},
            "no spare has the slots of node-2, 0, 1, 2, 3; got node-3, node-4;"
            " bring node-2 back, or add a spare to the cluster's settings",
        ),
        (
            {"command": ("deepspeed", "t.py"), "slots": {"node-1": (1, 2), "node-2": (1, 2)}},
            "names slots of node-2 in its command; got --include; bring node-2 back, or use its first slots",
        ),
    ],
)
def test_why_no_spare_can(tmp_path: Path, nodes: Path, changes: dict[str, Any], what: str) -> None:  # noqa: F811
    folder = a_run(tmp_path, **changes)
    for node in ("node-3", "node-4"):
        says(nodes, node, {}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert (moved.supervision, moved.reason) == (None, f"{RUN_ID}: {what}")


def test_a_spare_that_has_another_version_of_tridock_by_now_is_passed_over(
    tmp_path: Path,
    nodes: Path,  # noqa: F811
) -> None:
    """`tridock up` replaces a node without a run while the run continues."""
    folder = a_run(tmp_path)
    says(nodes, "node-3", {"another": "field"}, {})
    says(nodes, "node-4", {"another": "field"}, {})
    moved = move(folder, supervision_of(folder), ["node-2"], from_scratch=True)
    assert moved.supervision is None
    assert moved.reason.endswith("; spare node-4: its image has another version of Tridock")
