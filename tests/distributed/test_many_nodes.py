"""A run on 6 to 64 nodes loses one: a real supervisor, agents and processes, all on this machine, without ssh."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.supervised import Run
from tests.patience import WORK_S
from tridock.contracts.run_folder import SUPERVISION
from tridock.contracts.supervision import Reach, Supervision
from tridock.node.agent.processes import stop_processes

pytestmark = [pytest.mark.distributed, pytest.mark.full]
NO_ROUTE = "ssh: connect to host {node} port 2222: No route to host"
SSH = f"""
if [ -e "$1/{{node}}.lost" ]; then echo "{NO_ROUTE}" >&2; exit 255; fi
shift
exec "$@"
"""


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    nodes = request.param
    others = tuple(f"n{number}" for number in range(1, nodes))
    reach = Reach(("bash", "-c", SSH, "ssh", str(tmp_path)), python=sys.executable)
    places = {"here": (0,), **{node: (number,) for number, node in enumerate(others, 1)}}
    fields = {"places": places, "remote": others, "reach": reach, "max_restarts": 1, "node_timeout_s": WORK_S}
    made = Run.make(tmp_path, ranks=nodes, **fields)
    yield made
    made.kill("start")
    stop_processes(made.folder.name, grace_s=0.0)


@pytest.mark.parametrize("run", [6, 32, 64], indirect=True)
def test_one_of_many_nodes_is_lost_and_comes_back(run: Run, tmp_path: Path) -> None:
    nodes = len(Supervision.from_json((run.folder / SUPERVISION).read_text()).ranks)
    lost = f"n{nodes // 2}"
    run.start()
    run.until(lambda: all((beat := run.beat(rank)) and beat.iteration > 12 for rank in range(nodes)), WORK_S)
    (tmp_path / f"{lost}.lost").touch()
    run.kill(lost)
    run.signal(nodes // 2, signal.SIGKILL)
    seconds = run.until(lambda: run.events("node_lost"), WORK_S)
    print(f"{nodes} nodes: the lost one was named after {seconds:.0f} s")
    (event,) = run.events("node_lost", "rank_died", "rank_hung", "run_failed", "head_lost")
    assert (event["node"], event["cause"]) == (lost, "node_silent")
    assert event["reason"].endswith(f"({NO_ROUTE.format(node=lost)})")
    (tmp_path / f"{lost}.lost").unlink()
    run.until(lambda: run.events("run_restarted"), WORK_S)
    (restarted,) = run.events("run_restarted")
    assert restarted["iteration"] >= 10
    further = restarted["iteration"] + 5
    run.until(lambda: all((beat := run.beat(rank)) and beat.iteration > further for rank in range(nodes)), WORK_S)
    run.stop()
    assert run.end(WORK_S) == 143
    run.until(lambda: not run.others("agent"))


def test_a_node_that_answers_late_is_not_lost(tmp_path: Path) -> None:
    """The node answers only after the supervisor has found it late; the run continues with it."""
    mark = tmp_path / "is-late"
    reach = Reach((sys.executable, "-m", "tests.distributed.late", str(mark)), python=sys.executable)
    fields = {"places": {"here": (0,), "n1": (1,)}, "remote": ("n1",), "reach": reach, "max_restarts": 1}
    run = Run.make(tmp_path, ranks=2, **fields, node_timeout_s=0.0)
    try:
        run.start("tests.distributed.late", "tridock.node")
        run.until(lambda: all((beat := run.beat(rank)) and beat.iteration > 12 for rank in (0, 1)), WORK_S)
        run.signal(0, signal.SIGKILL)
        run.until(lambda: run.events("run_restarted", "not_restarted", "run_moved"), WORK_S)
        assert mark.exists()
        assert run.events("not_restarted", "run_moved") == []
        run.stop()
        assert run.end(WORK_S) == 143
    finally:
        run.kill("start")
        stop_processes(run.folder.name, grace_s=0.0)
