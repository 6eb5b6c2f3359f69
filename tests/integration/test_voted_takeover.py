"""A head is lost whose folder no node shares: another node is elected, with copies of its files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clone import Clone, a_clone
from tests.integration.rack import TINY, write_data
from tests.integration.support import succeed, wait_until
from tools.separate_runs import HEAD, OTHER, SPARE, put_on_every_node, runs_of, write_hostfile

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]  # tests/distributed/test_voted_takeover.py

FIELDS = {"train.train_iters": 240, "train.save": True, "train.save_interval": 20, "train.log_interval": 1}
RESTART = {"restart.max": 1, "restart.node_timeout": 30, "restart.replication_factor": 2}


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Three nodes, the last a spare, each with a folder for its runs that no other one sees."""
    with a_clone(tmp_path_factory.mktemp("voted"), cpu_image) as clone:
        (clone.folder / "configs" / "tiny.yaml").write_text(json.dumps(TINY))
        write_hostfile(clone.folder, clone.name)
        write_data(clone.folder / "data" / "tiny")
        yield clone


@dataclass
class Run:
    clone: Clone
    run_id: str

    def folder(self, node: str) -> Path:
        return runs_of(self.clone.folder, node) / self.run_id

    def events(self, node: str, name: str) -> list[dict[str, Any]]:
        path = self.folder(node) / "events.jsonl"
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [line for line in lines if line["event"] == name]

    def losses(self, node: str) -> dict[int, float]:
        lines = [json.loads(line) for line in (self.folder(node) / "metrics.jsonl").read_text().splitlines()]
        logged = [line for line in lines if "split" not in line]
        found = {line["iteration"]: line["loss"] for line in logged}
        assert len(found) == len(logged)
        return found

    def is_supervised(self, node: str) -> bool:
        return bool(
            inside(self.clone, node, f"flock --nonblock /workspace/runs/{self.run_id}/.supervisor true || echo 1")
        )

    def processes(self, node: str) -> list[str]:
        return inside(self.clone, node, f'grep -slzx "TRIDOCK_RUN_ID={self.run_id}" /proc/[0-9]*/environ').split()

    def end(self, node: str) -> int:
        path = self.folder(node) / "exit_code"
        wait_until(path.exists, "the run ends", 240)
        return int(path.read_text())


def container_of(clone: Clone, node: str) -> str:
    return f"{clone.twin}-{node}-1"


def inside(clone: Clone, node: str, script: str) -> str:
    done = clone.run("docker", "exec", container_of(clone, node), "bash", "-c", script)
    return done.stdout


@contextmanager
def launched(clone: Clone, **fields: object) -> Iterator[Run]:
    hosts = f"--hosts hostfiles/{clone.name}.local"
    clone.succeed(f"fab up {hosts}")
    changes = " ".join(f"--set {name}={json.dumps(value)}" for name, value in fields.items())
    id_file = clone.folder / f"id-{time.time_ns()}"
    try:
        with put_on_every_node(clone.folder):
            clone.succeed(f"fab launch {hosts} --config configs/tiny.yaml --detach --run-id-file {id_file} {changes}")
        yield Run(clone, id_file.read_text().strip())
    finally:
        clone.run("fab", "stop", *hosts.split())


def losses_of_a_calm_run(twin: Clone, **fields: object) -> dict[int, float]:
    with launched(twin, **{**FIELDS, **RESTART, **fields}) as run:
        assert run.end(HEAD) == 0
        return run.losses(HEAD)


@pytest.fixture(scope="module")
def calm(twin: Clone) -> dict[int, float]:
    """The losses of a run that loses nothing."""
    return losses_of_a_calm_run(twin)


def wait_for_a_copy(run: Run) -> None:
    wait_until(lambda: len(run.events(HEAD, "checkpoint_saved")) > 1, "it has saved", 240)
    copied = run.folder(OTHER) / ".replica" / "copy.json"
    wait_until(lambda: copied.exists() and json.loads(copied.read_text())["iteration"] > 0, "it is copied")


def wait_for_a_takeover(run: Run) -> None:
    began = time.monotonic()
    wait_until(lambda: run.events(OTHER, "taken_over") != [], "another node takes over", 240)
    print(f"another node took over after {time.monotonic() - began:.1f} s")


def check_the_end(run: Run, calm: dict[int, float], *, may_repeat: bool = False) -> None:
    taken, *again = run.events(OTHER, "taken_over")
    assert (taken["node"], taken["previous"]) == (OTHER, HEAD)
    assert (taken["token"], again) == (2, []) or may_repeat
    (moved,) = run.events(OTHER, "run_moved")
    assert (moved["lost"], moved["nodes"]) == ([HEAD], [OTHER, SPARE])
    assert run.losses(OTHER) == calm
    assert run.processes(OTHER) == run.processes(SPARE) == []


def test_a_head_that_is_killed(twin: Clone, calm: dict[int, float]) -> None:
    with launched(twin, **FIELDS, **RESTART) as run:
        wait_for_a_copy(run)
        succeed("docker", "kill", container_of(twin, HEAD))
        wait_for_a_takeover(run)
        assert run.end(OTHER) == 0
        check_the_end(run, calm)


def test_a_head_that_is_cut_off_ends_itself_first(twin: Clone, calm: dict[int, float]) -> None:
    with launched(twin, **FIELDS, **RESTART) as run:
        wait_for_a_copy(run)
        network = f"{twin.twin}_default"
        succeed("docker", "network", "disconnect", network, container_of(twin, HEAD))
        try:
            wait_until(lambda: not run.is_supervised(HEAD), "the old supervisor ends")
            assert not run.is_supervised(OTHER)
            wait_until(lambda: run.processes(HEAD) == [], "the old head's ranks end")
            wait_for_a_takeover(run)
            assert run.end(OTHER) == 0
            assert not (run.folder(HEAD) / "exit_code").exists()
            log = (run.folder(HEAD) / "logs" / "launcher.log").read_text()
            assert "got no answer from a majority of node-1, node-2, node-3 for 12 s" in log
        finally:
            succeed("docker", "network", "connect", network, container_of(twin, HEAD))
        check_the_end(run, calm)


def test_checkpoints_on_a_shared_disk_that_holds_no_runs(twin: Clone) -> None:
    """FSDP's have to be in a folder that all nodes share. What the head logged after the last copy is lost with it."""
    sharded = {"parallel.strategy": "fsdp", "parallel.zero_stage": 0}
    calm = losses_of_a_calm_run(twin, **sharded, **{"train.checkpoint_folder": "data/calm"})
    with launched(twin, **FIELDS, **RESTART, **sharded, **{"train.checkpoint_folder": "data/disturbed"}) as run:
        wait_for_a_copy(run)
        succeed("docker", "kill", container_of(twin, HEAD))
        wait_for_a_takeover(run)
        assert run.end(OTHER) == 0
        lost = calm.keys() - run.losses(OTHER).keys()
        assert lost <= set(range(21, 240))
        check_the_end(run, {n: loss for n, loss in calm.items() if n not in lost})


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("nsenter", "iptables"))), reason="needs root")
def test_an_election_while_packets_are_lost(twin: Clone, calm: dict[int, float]) -> None:
    """It may take several, each with a new token; one node leads the run in the end."""
    with launched(twin, **FIELDS, **RESTART) as run:
        wait_for_a_copy(run)
        succeed("docker", "kill", container_of(twin, HEAD))
        with packets_lost(twin, OTHER):
            wait_for_a_takeover(run)
        assert run.end(OTHER) == 0
        check_the_end(run, calm, may_repeat=True)


@contextmanager
def packets_lost(clone: Clone, node: str) -> Iterator[None]:
    """While 30 % of the packets to a node are lost."""
    pid = succeed("docker", "inspect", "--format", "{{.State.Pid}}", container_of(clone, node)).strip()
    rule = "INPUT -m statistic --mode random --probability 0.3 -j DROP"
    succeed("nsenter", "-t", pid, "-n", "iptables", "-A", *rule.split())
    try:
        yield
    finally:
        succeed("nsenter", "-t", pid, "-n", "iptables", "-D", *rule.split())
