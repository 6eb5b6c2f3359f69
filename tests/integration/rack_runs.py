"""Runs on the rack's hosts: how to start and find them, and what to read of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.rack import CLUSTER, UID, WORKDIR, Rack
from tests.integration.support import wait_until

NODE = f"tridock-{CLUSTER}"
RUNS = f"{WORKDIR}/workspace/runs"
HOSTS = ("host-a", "host-b")
TINY = ("--config", "configs/tiny.yaml")
SLEEP = ("--", "sleep", "9999")
"""A program where no rank has to train: torch takes seconds to import on each."""


def sleeping(name: str) -> tuple[str, ...]:
    return ("run", "--workdir", "hostfiles", "--detach", "--run-id-file", name)


def tiny(**fields: object) -> list[str]:
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    return [*TINY, *(word for name, value in changes.items() for word in ("--set", f"{name}={value}"))]


def run_id_of(path: Path) -> str:
    wait_until(path.exists, "the run has started")
    return path.read_text().strip()


def state_of(rack: Rack, run_id: str) -> str:
    line = next(line for line in rack.fab("status").stdout.splitlines() if run_id in line)
    return line.split("│")[3].strip()


def metrics(rack: Rack, run_id: str) -> list[dict[str, object]]:
    text = rack["host-a"].execute(f"cat {RUNS}/{run_id}/metrics.jsonl").stdout
    return [json.loads(line) for line in text.splitlines()]


@dataclass
class Finished:
    run_id: str
    output: str


@dataclass
class PausedRun:
    rack: Rack
    run_id: str
    terminal: str
    exit_code: int

    def release(self) -> None:
        ranks = self.rack["host-a"].ranks(self.run_id)
        assert ranks, "the paused run has lost its rank"
        self.rack["host-a"].signal("CONT", ranks)


@contextmanager
def a_run(rack: Rack, name: str, *options: str, config: str | None = None) -> Iterator[str]:
    """A run of a program that sleeps on both nodes, or that of a configuration."""
    started = ("run", "--config", config, "--detach", "--run-id-file", name) if config else sleeping(name)
    done = rack.fab(*started, "--no-check", *options, *(() if config else SLEEP))
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(rack.project / name)
    try:
        wait_until(lambda: all(host.processes(run_id, "^sleep") for host in rack), "its ranks have started")
        yield run_id
    finally:
        rack.fab("stop", "--run", run_id)


def one_host(rack: Rack) -> dict[str, object]:
    """Settings of a cluster of host-b alone."""
    return {"nodes": {"host-b": {"address": rack["host-b"].address}}}


def lives(paused: PausedRun) -> bool:
    return all(host.ranks(paused.run_id) for host in paused.rack) and state_of(paused.rack, paused.run_id) == "running"


def every_node_reaches_every_node(rack: Rack) -> None:
    for source in HOSTS:
        for target in HOSTS:
            said = rack.node(source, "ssh", target, "echo $TRIDOCK_NODE $OMP_NUM_THREADS $(id -u)")
            assert said == f"{target} 1 {UID}\n"


def secret_lines(rack: Rack) -> list[str]:
    """The lines of every private key of the cluster."""
    stored = json.loads((rack.project / ".tridock" / CLUSTER / ".keys.json").read_text())
    keys = (stored["client"], *stored["hosts"].values())
    lines = [line for key in keys for line in key.splitlines() if not line.startswith("-----")]
    assert len({*lines}) > 9
    # The first lines of an OpenSSH key are the same in all of them.
    return [line for line in {*lines} if not line.startswith("b3BlbnNzaC1rZXktdjEA")]
