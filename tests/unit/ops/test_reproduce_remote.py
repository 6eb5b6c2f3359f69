"""Which run a `tridock reproduce` or `resume` is about, and where it is repeated; the rest needs nodes
(tests/integration/test_reproduce.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tridock.cluster.settings import Cluster, load_cluster
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs import fetch
from tridock.ops.runs.reproduce_remote import on_its_slots


@pytest.mark.parametrize("error", [RequestError, ClusterError])
def test_a_run_that_was_fetched_before_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RequestError] | type[ClusterError]
) -> None:
    def unknown(*given: object, **named: object) -> None:
        raise error(Problem("--run", "is not a run of this cluster", "a-1", "see tridock status"))

    monkeypatch.setattr(fetch, "choose_run", unknown)
    (tmp_path / "lab").write_text("node-1 slots=1\n")
    hosts = Hosts(load_cluster(tmp_path / "lab"))
    monkeypatch.setattr(NodeClient, "of", lambda hosts: NodeClient(hosts, {}))
    for wanted in ("a-1", None):
        with pytest.raises(error) as caught:
            fetch.newest_copy(hosts, wanted, tmp_path / "runs")
        assert str(caught.value).startswith("--run: is not a run of this cluster; got a-1; see tridock status")
    (tmp_path / "runs" / "a-1").mkdir(parents=True)
    assert fetch.newest_copy(hosts, "a-1", tmp_path / "runs") == tmp_path / "runs" / "a-1"


def ran_on(folder: Path, slots: Mapping[str, tuple[int, ...]]) -> Path:
    """The folder of a run that used these slots."""
    places = [(node, slot) for node, numbers in slots.items() for slot in numbers]
    ranks = [{"rank": rank, "node": node, "slot": slot} for rank, (node, slot) in enumerate(places)]
    folder.mkdir()
    (folder / "experiment.yaml").write_text("name: a\n")
    (folder / "plan.json").write_text(json.dumps({"world_size": len(ranks), "ranks": ranks}))
    return folder


def a_lab(folder: Path, include: str = "") -> Cluster:
    (folder / "lab").write_text("".join(f"n{number} slots=4\n" for number in range(1, 6)))
    (folder / "lab.yaml").write_text("spares: [n5]\n")
    return load_cluster(folder / "lab", include)


@pytest.mark.parametrize("slots", [{"n2": (0, 1, 2, 3), "n4": (0, 1)}, {"n3": (1, 3)}, {"n2": (0,), "n1": (0,)}])
def test_a_run_is_repeated_on_its_nodes_and_slots(tmp_path: Path, slots: Mapping[str, tuple[int, ...]]) -> None:
    cluster = on_its_slots(a_lab(tmp_path), ran_on(tmp_path / "a-1", slots))
    assert (dict(cluster.slots), cluster.head) == (slots, next(iter(slots)))
    assert dict(cluster.spares) == {"n5": (0, 1, 2, 3)}
    assert Hosts(a_lab(tmp_path)).within(cluster).head == cluster.head


def test_a_run_that_moved_to_a_spare_is_repeated_there(tmp_path: Path) -> None:
    cluster = on_its_slots(a_lab(tmp_path), ran_on(tmp_path / "a-1", {"n1": (0,), "n5": (0,)}))
    assert (dict(cluster.slots), cluster.spares) == ({"n1": (0,), "n5": (0,)}, {})


def test_elsewhere_a_run_is_repeated_on_as_many_slots_of_each_node(tmp_path: Path) -> None:
    run = ran_on(tmp_path / "a-1", {"n1": (0, 1), "n2": (0, 1)})
    other = a_lab(tmp_path, "n3:2,3@n4:0,1")
    assert on_its_slots(other, run, chosen=True) is other
    gone = ran_on(tmp_path / "a-2", {"gone": (0, 1), "n2": (0, 1)})
    assert on_its_slots(other, gone) is other


@pytest.mark.parametrize(
    ("slots", "include", "then", "now"),
    [
        ({"n1": (0, 1), "n2": (0, 1)}, "n1:0,1", "n1: 0,1, n2: 0,1", "n1: 0,1"),
        ({"n1": (0, 1), "n2": (0, 1)}, "n1@n2:0", "n1: 0,1, n2: 0,1", "n1: 0,1,2,3, n2: 0"),
        ({"gone": (0, 1)}, "", "gone: 0,1", ", ".join(f"n{number}: 0,1,2,3" for number in range(1, 5))),
        ({"n1": (3, 4)}, "n1", "n1: 3,4", "n1: 0,1,2,3"),
        ({}, "n1", "unknown slots", "n1: 0,1,2,3"),
    ],
)
def test_a_run_is_not_repeated_on_other_slots(
    tmp_path: Path, slots: Mapping[str, tuple[int, ...]], include: str, then: str, now: str
) -> None:
    cluster, run = a_lab(tmp_path, include), ran_on(tmp_path / "a-1", slots)
    with pytest.raises(RequestError) as caught:
        on_its_slots(cluster, run, chosen=bool(include))
    assert str(caught.value) == (
        f"a-1: ran on {then}: it is repeated on these, or on as many slots of each node; got {now};"
        " choose such with --hosts and --include, or repeat it on these slots with --force"
    )
    assert on_its_slots(cluster, run, chosen=bool(include), force=True).slots == cluster.slots
