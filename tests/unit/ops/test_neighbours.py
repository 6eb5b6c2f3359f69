"""Runs of other clusters on the same hosts: which of this cluster's slots they use."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.unit.ops.conftest import program
from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import Container, HostState
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.neighbours import devices_of, neighbours, refuse_slots_of_neighbours
from tridock.remote import LocalHost

RUN = RunInfo(
    "a-20260101-000000-1234", RunState.RUNNING, None, "20260101-000000", None, "a", (), 10, 1.0, 1.0,
    slots={"n1": (0, 1)}, started_by="ada@desk",
)  # fmt: skip
OWN = Container("1", "i", running=True, recipe=None, exit_code=0, health="healthy", gpus=("2", "3"))
OTHER = replace(OWN, id="2", cluster="vision", node="n1", user="1002:100", gpus=None)
FACTS = HostFacts(1000, 100, "/home/ada", 4, False)


def answers(tmp_path: Path, answer: str, running: str = "true") -> None:
    (tmp_path / "answer").write_text(answer)
    program(
        tmp_path / "docker",
        f'case $1 in inspect) echo {running};; exec) [ "$*" = "exec --user 1002:100 2 tridock-python -P -m tridock.node'
        f' runs" ] || exit 2; echo warning >&2; cat {tmp_path}/answer; [ -s {tmp_path}/answer ];; esac',
    )


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeClient:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "lab").write_text("gpu-1 slots=2\ngpu-2 slots=2\n")
    hosts = Hosts(load_cluster(tmp_path / "lab"), {"gpu-1": LocalHost("gpu-1"), "gpu-2": LocalHost("gpu-2")})
    alone = HostState(FACTS, None, OWN, None)
    return NodeClient(hosts, {"gpu-1": replace(alone, others=(OTHER,)), "gpu-2": alone})


@pytest.mark.parametrize(
    ("slots", "ours"), [((0, 1), None), ((1, 2), "gpu-1: 0"), ((0, 1, 2, 3), "gpu-1: 0,1"), ((), None)]
)
def test_slots_are_compared_by_what_they_are_on_the_host(
    client: NodeClient, tmp_path: Path, slots: tuple[int, ...], ours: str | None
) -> None:
    """This cluster has GPUs 2 and 3 of the host as slots 0 and 1, the other one all four."""
    answers(tmp_path, json.dumps([asdict(replace(RUN, slots={"n1": slots, "n2": (2,)}))]))
    if ours is None:
        refuse_slots_of_neighbours(client)
        return
    with pytest.raises(RequestError) as caught:
        refuse_slots_of_neighbours(client)
    assert str(caught.value) == (
        f"{RUN.run_id}: is running on slots that this run would use, in cluster vision; got {ours}, started by "
        "ada@desk; wait for it (--queue), have it stopped there, leave its slots out (--exclude), or give --share"
    )


def test_a_later_tridock_may_say_more(client: NodeClient, tmp_path: Path) -> None:
    answers(tmp_path, json.dumps([{**asdict(RUN), "new": 1}]))
    (found,) = neighbours(client)
    assert (found.cluster, found.run, found.devices, str(found)) == (
        "vision", RUN, {"gpu-1": ("GPU 0", "GPU 1")}, "gpu-1: GPU 0, GPU 1"
    )  # fmt: skip


@pytest.mark.parametrize("answer", ["", "no such verb", "[{}]", '[{"run_id": "../x"}]', "[3]", "{}x", "7"])
def test_a_node_that_does_not_say_is_not_taken_for_idle(client: NodeClient, tmp_path: Path, answer: str) -> None:
    answers(tmp_path, answer)
    with pytest.raises(ClusterError, match="gpu-1: its node of cluster vision does not say which slots its runs use; "):
        neighbours(client)


def test_a_node_that_has_gone_since_holds_nothing(client: NodeClient, tmp_path: Path) -> None:
    answers(tmp_path, "", running="false")
    assert neighbours(client) == []


def test_what_a_run_locks(client: NodeClient) -> None:
    assert devices_of(client) == {"gpu-1": ("GPU 2", "GPU 3"), "gpu-2": ("GPU 2", "GPU 3")}
