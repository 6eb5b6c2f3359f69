"""Runs of ranks that train nothing, under a real supervisor on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import ROOT, free_port, rank_environment, read_lines
from tests.patience import STEP_S
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.events import Event
from tridock.contracts.run_state import exit_code_of
from tridock.contracts.supervision import Supervision
from tridock.node.agent.processes import find_processes, stop_processes

SCRIPT = "exec {python} {program} {folder} {ranks} {steps} {load}\n"
STARTER = (
    "exec {python} -m tridock.node start-ranks --nproc-per-node {ranks} --master-port 1 {program} {folder} rank 9999"
)


@dataclass
class Run:
    """A run of steady ranks on this machine."""

    folder: Path

    @classmethod
    def make(cls, workspace: Path, ranks: int = 2, steps: int = 10**6, script: str = SCRIPT, **fields: Any) -> Run:
        folder = workspace / "runs" / run_folder.new_run_id("steady")
        folder.mkdir(parents=True)
        program = Path(__file__).with_name("steady.py")
        for name, load in ((run_folder.LAUNCH_SCRIPT, ""), (run_folder.RESUME_SCRIPT, "load")):
            values = {"ranks": ranks, "program": program, "python": sys.executable}
            (folder / name).write_text(script.format(folder=folder, steps=steps, load=load, **values))
        base = {"master_port": free_port(), "hang_timeout_s": STEP_S, "checkpoints": f"{folder}/checkpoints"}
        all_here = {"here": tuple(range(ranks)), **dict.fromkeys(fields.get("remote", ()), ())}
        supervision = Supervision("here", fields.pop("places", all_here), **{"remote": (), **base, **fields})
        (folder / run_folder.SUPERVISION).write_text(supervision.to_json())
        return cls(folder)

    def start(self, *program: str) -> None:
        arguments = [sys.executable, "-m", *(program or ["tridock.node"]), "start", str(self.folder)]
        subprocess.run(arguments, env=rank_environment(), cwd=ROOT, check=True, timeout=STEP_S)

    def beat(self, rank: int) -> heartbeat.Heartbeat | None:
        return heartbeat.read(self.folder, rank)

    def train(self, beyond: int = 2, ranks: int = 2) -> None:
        """Waits until every rank is further than that."""
        self.until(
            lambda: all((b := self.beat(n)) and b.phase == "train" and b.iteration > beyond for n in range(ranks))
        )

    def until(self, condition: Callable[[], object], seconds: float = STEP_S) -> float:
        """Waits; how long it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, (self.log(), self.events())
            time.sleep(0.02)
        return time.monotonic() - began

    def signal(self, rank: int, number: int) -> None:
        beat = self.beat(rank)
        assert beat is not None
        os.kill(beat.pid, number)

    def ask(self, rank: int, word: str) -> None:
        (self.folder / f"{rank}-{word}").touch()

    def finish(self, ranks: int = 2) -> int:
        """Lets the ranks end as after their last step; the run's exit code."""
        for rank in range(ranks):
            self.ask(rank, "finish")
        return self.end()

    def end(self, seconds: float = STEP_S) -> int:
        self.until(lambda: exit_code_of(self.folder) is not None, seconds)
        code = exit_code_of(self.folder)
        assert code is not None
        assert find_processes(self.folder.name) == []
        return code

    def events(self, *names: str) -> list[dict[str, Any]]:
        path = self.folder / run_folder.EVENTS
        events = read_lines(path) if path.exists() else []
        plain = [{name: value for name, value in event.items() if name != "time"} for event in events]
        of_the_run = [event for event in plain if event["event"] != Event.DISK_NEARLY_FULL]  # this machine's may be
        return [event for event in of_the_run if not names or event["event"] in names]

    def log(self) -> list[str]:
        return (self.folder / run_folder.LAUNCHER_LOG).read_text().splitlines()

    def said(self) -> list[str]:
        return [line for line in self.log() if line.startswith("tridock: ")]

    def stop(self) -> subprocess.CompletedProcess[str]:
        workspace = str(self.folder.parents[1])
        arguments = [sys.executable, "-m", "tridock.node", "stop", self.folder.name, "--workspace", workspace]
        return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True, timeout=STEP_S)

    def others(self, verb: str) -> dict[int, list[bytes]]:
        """The processes of ``tridock.node`` that are at work for this run, with their arguments."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            except OSError:
                continue
            if b"tridock.node" in argv and verb.encode() in argv and str(self.folder).encode() in argv:
                found[int(entry.name)] = argv
        return found

    def kill(self, *verbs: str) -> None:
        """Kills those processes, except where one ends first."""
        for verb in verbs:
            for pid in self.others(verb):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def made(**fields: Any) -> Run:
        runs.append(Run.make(tmp_path, **fields))
        return runs[-1]

    yield made
    for run in runs:
        run.kill("start", "agent")
        stop_processes(run.folder.name, grace_s=0.0)


Make = Callable[..., Run]
