"""A head is lost whose folder no node shares: another node is elected, with copies of its files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.clone import Clone, a_clone
from tests.integration.rack import TINY, write_data
from tests.integration.support import succeed, wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]  # tests/distributed/test_voted_takeover.py

HEAD, OTHER, SPARE = NODES = ("node-1", "node-2", "node-3")
FIELDS = {"train.train_iters": 240, "train.save": True, "train.save_interval": 20, "train.log_interval": 1}
RESTART = {"restart.max": 1, "restart.node_timeout": 30, "restart.replication_factor": 2}


def folder_of(clone: Clone, node: str) -> Path:
    return clone.folder / ("runs" if node == HEAD else f"runs-of-{node}")


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Three nodes, the last a spare, each with a folder for its runs that no other one sees."""
    with a_clone(tmp_path_factory.mktemp("voted"), cpu_image) as clone:
        path = clone.folder / "docker-compose.yml"
        compose = yaml.safe_load(path.read_text())
        text = json.dumps(compose["services"][OTHER])
        for node in (OTHER, SPARE):
            own = text.replace(OTHER, node).replace("./runs:", f"./{folder_of(clone, node).name}:")
            compose["services"][node] = json.loads(own)
            folder_of(clone, node).mkdir()
        path.write_text(yaml.safe_dump(compose))
        (clone.folder / "configs" / "tiny.yaml").write_text(json.dumps(TINY))
        (clone.folder / "hostfiles" / "twin").write_text("".join(f"{node} slots=1\n" for node in NODES))
        settings = clone.folder / "hostfiles" / "twin.yaml"
        settings.write_text(f"{settings.read_text()}spares: [{SPARE}]\n")
        write_data(clone.folder / "data" / "tiny")
        yield clone


@dataclass
class Run:
    clone: Clone
    run_id: str

    def folder(self, node: str) -> Path:
        return folder_of(self.clone, node) / self.run_id

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


def inside(clone: Clone, node: str, script: str) -> str:
    done = clone.run("docker", "exec", f"{clone.twin}-{node}-1", "bash", "-c", script)
    return done.stdout


def put_on_every_node(clone: Clone, ended: threading.Event) -> None:
    """The launch puts a run on every node, but thinks that all of a twin's share one folder."""
    known = {path.name for path in folder_of(clone, HEAD).iterdir()}
    while not ended.wait(0.02):
        for path in folder_of(clone, HEAD).iterdir():
            if path.name not in known and (path / ".supervisor").exists():
                known.add(path.name)
                for node in (OTHER, SPARE):
                    ignored = shutil.ignore_patterns(".*", "events.jsonl")
                    shutil.copytree(path, folder_of(clone, node) / path.name, ignore=ignored)


@contextmanager
def launched(clone: Clone, **fields: object) -> Iterator[Run]:
    clone.succeed("fab up --hosts hostfiles/twin")
    changes = " ".join(f"--set {name}={json.dumps(value)}" for name, value in fields.items())
    id_file, ended = clone.folder / f"id-{time.time_ns()}", threading.Event()
    thread = threading.Thread(target=put_on_every_node, args=(clone, ended))
    thread.start()
    try:
        launch = f"fab launch --hosts hostfiles/twin --config configs/tiny.yaml --detach --run-id-file {id_file}"
        clone.succeed(f"{launch} {changes}")
        yield Run(clone, id_file.read_text().strip())
    finally:
        ended.set()
        thread.join()
        clone.run("fab", "stop", "--hosts", "hostfiles/twin")


@pytest.fixture(scope="module")
def calm(twin: Clone) -> dict[int, float]:
    """The losses of a run that loses nothing."""
    with launched(twin, **FIELDS, **RESTART) as run:
        assert run.end(HEAD) == 0
        return run.losses(HEAD)


@pytest.mark.parametrize("cut_off", [False, True])
def test_another_node_is_elected_and_the_losses_stay(twin: Clone, calm: dict[int, float], cut_off: bool) -> None:
    with launched(twin, **FIELDS, **RESTART) as run:
        wait_until(lambda: len(run.events(HEAD, "checkpoint_saved")) > 1, "it has saved", 240)
        copied = run.folder(OTHER) / ".replica" / "copy.json"
        wait_until(lambda: copied.exists() and json.loads(copied.read_text())["iteration"] > 0, "it is copied")
        container, network = f"{twin.twin}-{HEAD}-1", f"{twin.twin}_default"
        succeed(
            *(("docker", "network", "disconnect", network, container) if cut_off else ("docker", "kill", container))
        )
        began = time.monotonic()
        try:
            if cut_off:
                wait_until(lambda: not run.is_supervised(HEAD), "the old supervisor ends")
                assert not run.is_supervised(OTHER)
                wait_until(lambda: run.processes(HEAD) == [], "the old head's ranks end")
            wait_until(lambda: run.events(OTHER, "taken_over") != [], "another node takes over", 120)
            print(f"another node took over after {time.monotonic() - began:.1f} s")
            assert run.end(OTHER) == 0
            if cut_off:
                assert not (run.folder(HEAD) / "exit_code").exists()
                log = (run.folder(HEAD) / "logs" / "launcher.log").read_text()
                assert "got no answer from a majority of node-1, node-2, node-3 for 12 s" in log
        finally:
            if cut_off:
                succeed("docker", "network", "connect", network, container)
        (taken,) = run.events(OTHER, "taken_over")
        assert (taken["node"], taken["previous"], taken["token"]) == (OTHER, HEAD, 2)
        (moved,) = run.events(OTHER, "run_moved")
        assert (moved["lost"], moved["nodes"]) == ([HEAD], [OTHER, SPARE])
        assert run.losses(OTHER) == calm
        assert run.processes(OTHER) == run.processes(SPARE) == []
