"""The demo's data set on the nodes of a launch that names no experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.ops.conftest import Lab
from tridock.command import Command
from tridock.ops.runs import demo_data
from tridock.ops.runs.demo_data import DEMO_DATA, bring_demo_data

ROOT = Path(__file__).parents[3]
NAMES = [f"{DEMO_DATA}/stdlib_text_document.{suffix}" for suffix in ("bin", "idx", "json")]


@pytest.fixture(autouse=True)
def _containers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes are up. `tridock data demo` in a container is a script here that writes what is missing."""
    monkeypatch.setattr(demo_data, "ensure_up", lambda client: ("sha256:1", client))

    def inside(node: str, *argv: str, **_: object) -> Command:
        assert argv == ("tridock", "data", "demo", "--folder", DEMO_DATA)
        write = f'for f in "$@"; do test -e "$f" || echo "$f of {node}" >"$f"; done'
        script = f"mkdir -p {DEMO_DATA}; {write}; echo note; echo made"
        lab.workspace(node).mkdir(parents=True, exist_ok=True)
        return Command(("sh", "-c", script, "sh", *NAMES), cwd=str(lab.workspace(node)))

    monkeypatch.setattr(lab.client, "inside", inside)


def test_the_head_makes_it_and_the_nodes_that_lack_it_get_a_copy(lab: Lab) -> None:
    assert bring_demo_data(lab.client)[0] == "made"
    wanted = {name: f"{name} of node-1\n".encode() for name in NAMES}
    assert lab.below("node-1") == lab.below("node-2") == wanted
    assert list(lab.project.glob("data/*")) == []


def test_data_that_is_there_is_left_alone(lab: Lab) -> None:
    folder = lab.workspace("node-2") / DEMO_DATA
    folder.mkdir(parents=True)
    for name in NAMES[:2]:
        (lab.workspace("node-2") / name).write_text("mine")
    assert bring_demo_data(lab.client)[0] == "made"
    assert lab.below("node-2") == dict.fromkeys(NAMES[:2], b"mine")
