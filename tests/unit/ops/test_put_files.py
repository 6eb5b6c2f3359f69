"""What a launch writes on each node."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tridock.command import Command
from tridock.contracts.supervision import Supervision
from tridock.launchers.run import RunBundle
from tridock.ops.runs.launch import put_files


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
