"""A run that loses a node for good: a spare takes its place, or fewer replicas continue. A twin of three nodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.clone import a_clone
from tests.integration.rack import TINY, write_data
from tests.integration.support import pause, succeed, wait_until
from tests.integration.test_faults import Run, Twin
from tests.patience import WORK_S

HEAD, OTHER, SPARE = "node-1", "node-2", "node-3"
LENGTH = {"train.train_iters": 240, "train.save": True, "train.save_interval": 20}
RESTART = {"restart.max": 1, "restart.node_timeout": 30, "launch.hang_timeout": WORK_S}
WHOLE = 45
"""After this iteration the first checkpoint is whole: the second one has been begun."""


def third_node(folder: Path) -> None:
    """The twin gets a node more, made as its second, but for its runs, which it shares with none."""
    path = folder / "docker-compose.yml"
    compose = yaml.safe_load(path.read_text())
    text = json.dumps(compose["services"][OTHER]).replace(OTHER, SPARE)
    compose["services"][SPARE] = json.loads(text.replace("./runs:", "./runs-of-its-own:"))
    (folder / "runs-of-its-own").mkdir()
    path.write_text(yaml.safe_dump(compose))


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    with a_clone(tmp_path_factory.mktemp("moved"), cpu_image) as clone:
        third_node(clone.folder)
        (clone.folder / "configs" / "tiny.yaml").write_text(json.dumps(TINY))
        (clone.folder / "hostfiles" / "twin").write_text("".join(f"{n} slots=1\n" for n in (HEAD, OTHER, SPARE)))
        settings = clone.folder / "hostfiles" / "twin.yaml"
        settings.write_text(f"{settings.read_text()}spares: [{SPARE}]\n")
        write_data(clone.folder / "data" / "tiny")
        clone.succeed("fab up --hosts hostfiles/twin")
        yield Twin(clone)


@pytest.fixture(scope="module")
def calm(twin: Twin) -> dict[int, float]:
    """The losses of a run that loses nothing, on two nodes."""
    with twin.launched(**LENGTH) as run:
        assert run.terminal.process.wait(timeout=WORK_S) == 0, run.terminal.text()
        return run.losses()


def lose(twin: Twin, run: Run, node: str = OTHER) -> dict[str, Any]:
    """Kills a node; returns the run's events about its move."""
    succeed("docker", "kill", twin.container(node))
    began = time.monotonic()
    wait_until(lambda: run.events("run_restarted") != [], "the run continues", WORK_S)
    print(f"a node that stays away: the run went on after {time.monotonic() - began:.1f} s")
    (event,) = run.events("run_moved")
    return event


@pytest.mark.full  # tests/distributed/test_local_disks.py: a lost node; tests/unit/ops/test_replan.py
def test_a_spare_takes_the_place_of_a_lost_node(twin: Twin, calm: dict[int, float]) -> None:
    """The very losses of a run that lost nothing: the same ranks do the same work."""
    with twin.launched(stops_beyond=WHOLE, **LENGTH, **RESTART) as run:
        event = lose(twin, run)
        assert (event["lost"], event["nodes"], event["layout"]) == ([OTHER], [HEAD, SPARE], "TP1 PP1 DP2")
        assert run.terminal.process.wait(timeout=WORK_S) == 0, run.terminal.text()
        assert "tridock: node-3 takes the place of node-2\n" in run.terminal.text()
        assert run.losses() == calm
        assert run.is_gone(HEAD)
        assert run.is_gone(SPARE)
        sent = twin.clone.folder / "runs-of-its-own" / run.run_id / "checkpoints"
        assert {path.name for path in sent.iterdir()} >= {"latest", "iter_0000240"}
        assert json.loads((run.folder / "before-1" / "plan.json").read_text())["ranks"][1]["node"] == OTHER
        assert json.loads((run.folder / "plan.json").read_text())["ranks"][1]["node"] == SPARE


@pytest.mark.full  # the states of two ranks in one: tests/distributed/test_other_world.py
def test_without_a_spare_fewer_replicas_continue(twin: Twin, calm: dict[int, float]) -> None:
    """The spare is busy with a run of its own. ZeRO's states of two ranks continue in one."""
    twin.clone.succeed("fab up --hosts hostfiles/twin")
    with twin.launched(stops_beyond=WHOLE, **LENGTH, **RESTART) as run:
        busy = "sleep-20260102-030405-abcd"
        twin.inside(SPARE, f"TRIDOCK_RUN_ID={busy} setsid sleep 9999 >/dev/null 2>&1 &")
        try:
            event = lose(twin, run)
            assert run.terminal.process.wait(timeout=WORK_S) == 0, run.terminal.text()
        finally:
            twin.inside(SPARE, "pkill -x sleep")
        assert (event["lost"], event["nodes"], event["layout"]) == ([OTHER], [HEAD], "TP1 PP1 DP1")
        assert event["reason"] == (
            "without node-2 it continues as TP1 PP1 DP1 (it was TP1 PP1 DP2) on node-1; global batch 8 as before, in 2 "
            f"micro-batches a replica; spare node-3: is busy with {busy}"
        )
        assert run.losses() == pytest.approx(calm, rel=1e-3)
        assert run.is_gone(HEAD)


@pytest.mark.full  # tests/unit/ops/test_replan.py
def test_with_too_few_nodes_it_ends_and_says_so(twin: Twin) -> None:
    twin.clone.succeed("fab up --hosts hostfiles/twin")
    with twin.launched(stops_beyond=WHOLE, **LENGTH, **RESTART, **{"restart.min_nodes": 2}) as run:
        succeed("docker", "kill", twin.container(OTHER), twin.container(SPARE))
        code, last = run.ends()
        assert code == 4, last
        (event,) = run.events("not_restarted")
        assert event["reason"].startswith("node-2 does not answer (")
        assert (
            f"{run.run_id}: may not continue with fewer than 2 nodes; got node-1; lower restart.min_nodes, or add "
            in (event["reason"])
        )
        assert "; spare node-3: ssh: " in event["reason"]


@pytest.mark.full  # tests/distributed/test_run_supervisor.py; tests/unit/contracts/test_lease.py
def test_another_node_takes_the_head_s_place(twin: Twin, calm: dict[int, float]) -> None:
    """It supervises, a spare trains, and the losses are those of a run that lost nothing."""
    twin.clone.succeed("fab up --hosts hostfiles/twin")
    with twin.launched(stops_beyond=WHOLE, **LENGTH, **RESTART) as run:
        event = lose(twin, run, HEAD)
        (taken,) = run.events("taken_over")
        assert (taken["node"], taken["previous"], taken["token"]) == (OTHER, HEAD, 2)
        assert (event["lost"], event["nodes"], event["layout"]) == ([HEAD], [OTHER, SPARE], "TP1 PP1 DP2")
        assert event["reason"] == "node-2 leads it in the place of node-1; node-3 takes the place of node-1"
        status = twin.clone.run("fab", "status", "--hosts", "hostfiles/twin").stdout
        assert re.search(rf"{run.run_id} .*running", status), status
        followed = twin.clone.run("fab", "logs", "--hosts", "hostfiles/twin", "--run", run.run_id)
        assert followed.returncode == 0, followed.stdout
        assert "restart 1 of at most 1, from the checkpoint of iteration " in followed.stdout
        assert (run.folder / "exit_code").read_text() == "0\n"
        assert run.losses() == calm
        assert run.is_gone(OTHER)
        assert run.is_gone(SPARE)
        code, last = run.ends()
        assert code == 3, last


@pytest.mark.full
def test_a_head_that_stood_still_leaves_the_run_to_its_successor(twin: Twin, calm: dict[int, float]) -> None:
    twin.clone.succeed("fab up --hosts hostfiles/twin")
    supervisor = "tridock.node start "
    with twin.launched(stops_beyond=WHOLE, **LENGTH, **RESTART) as run:
        twin.signal(HEAD, "STOP", supervisor)
        wait_until(lambda: run.events("run_restarted") != [], "the run continues", WORK_S)
        run.stop_other(beyond=WHOLE + 20, rank=0)  # it is not over before the old supervisor has looked at it
        twin.signal(HEAD, "CONT", supervisor)
        wait_until(lambda: not twin.inside(HEAD, f"pgrep -f '{supervisor}'"), "the old supervisor has ended")
        assert not (run.folder / "exit_code").exists()
        run.continue_other()
        wait_until((run.folder / "exit_code").exists, "the run ends", WORK_S)
        assert (run.folder / "exit_code").read_text() == "0\n"
        assert [event["node"] for event in run.events("taken_over")] == [HEAD]
        assert run.losses() == calm
        said = (run.folder / "logs" / "launcher.log").read_text()
        assert said.count("tridock: the supervisor on node-1 was suspended, and ") == 1


@pytest.mark.full
def test_a_paused_head_that_comes_back_does_not_touch_the_run(twin: Twin, calm: dict[int, float]) -> None:
    """Its supervisor, its agent and its rank go on where they stood, while the run is long elsewhere."""
    twin.clone.succeed("fab up --hosts hostfiles/twin")
    with twin.launched(stops_beyond=WHOLE, **LENGTH, **RESTART) as run:
        pause(twin.container(HEAD))
        try:
            wait_until(lambda: run.events("run_restarted") != [], "the run continues", WORK_S)
        finally:
            succeed("docker", "unpause", twin.container(HEAD))
        wait_until((run.folder / "exit_code").exists, "the run ends", WORK_S)
        assert (run.folder / "exit_code").read_text() == "0\n"
        assert [event["node"] for event in run.events("taken_over")] == [OTHER]
        assert run.losses() == calm
        wait_until(lambda: run.is_gone(HEAD), "nothing of the run is left on its old head")
        said = (run.folder / "logs" / "launcher.log").read_text()
        assert said.count("tridock: the supervisor on node-1 was suspended, and node-2 took over the run\n") == 1
