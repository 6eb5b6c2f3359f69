"""Moves your own program to other nodes: a spare replaces each lost one, rank by rank.

Uses only the standard library, as your image has nothing else. A program is never laid out on fewer nodes, as Tridock
cannot know whether that works.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tridock.contracts import run_folder
from tridock.contracts.supervision import NewLayout, Supervision
from tridock.errors import Problem, RequestError

_SCRIPTS = (run_folder.LAUNCH_SCRIPT, run_folder.RESUME_SCRIPT)


def on_spares(folder: Path, supervision: Supervision, lost: Sequence[str], ready: Sequence[str]) -> NewLayout:
    """Returns the run with its ``lost`` nodes replaced by ``ready`` spares.

    A spare needs the same slots as the node it replaces, which the nodes' scripts name. Raises :class:`RequestError`.
    """
    plan: dict[str, Any] = json.loads((folder / run_folder.PLAN).read_text())
    places = _places(folder, supervision, _slots_of(plan), lost, ready)
    ranks = {places.get(node, node): numbers for node, numbers in supervision.ranks.items()}
    nodes = tuple(ranks)
    after = replace(
        supervision,
        ranks=ranks,
        remote=tuple(node for node in nodes if node != supervision.head),
        spares={node: slots for node, slots in supervision.spares.items() if node not in nodes},
    )
    for rank in plan["ranks"]:
        rank["node"] = places.get(rank["node"], rank["node"])
    lines = [line.partition(" ") for line in (folder / run_folder.HOSTFILE).read_text().splitlines()]
    files = {
        run_folder.HOSTFILE: "".join(f"{places.get(node, node)} {slots}\n" for node, _, slots in lines),
        run_folder.PLAN: json.dumps(plan, indent=2) + "\n",
        run_folder.SUPERVISION: after.to_json(),
    }
    summary = "; ".join(f"{spare} takes the place of {node}" for node, spare in places.items())
    return NewLayout(summary, "", len(plan["ranks"]), nodes, files)


def _slots_of(plan: Mapping[str, Any]) -> dict[str, set[int]]:
    slots: dict[str, set[int]] = {}
    for rank in plan["ranks"]:
        slots.setdefault(rank["node"], set()).add(rank["slot"])
    return slots


def _places(
    folder: Path,
    supervision: Supervision,
    slots: Mapping[str, set[int]],
    lost: Sequence[str],
    ready: Sequence[str],
) -> dict[str, str]:
    """Returns the spare of each lost node."""
    places: dict[str, str] = {}
    for node in lost:
        free = [name for name in ready if name not in places.values()]
        spare = next((name for name in free if slots[node] <= set(supervision.spares[name])), None)
        if spare is None:
            got, todo = ", ".join(free) or "none", f"bring {node} back, or add a spare to the cluster's settings"
            what = f"no spare has the slots of {node}, {', '.join(map(str, sorted(slots[node])))}"
            raise RequestError(Problem(folder.name, what, got, todo))
        places[node] = spare
        if any(f"{node}:" in run_folder.read_text(folder / script) for script in _SCRIPTS):
            what, todo = f"names slots of {node} in its command", f"bring {node} back, or use its first slots"
            raise RequestError(Problem(folder.name, what, "--include", todo))
    return places
