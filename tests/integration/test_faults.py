"""Faults for real on the twin: whatever is killed, stopped or cut off, the run ends everywhere, in time, and says why.

Times are printed (``pytest -s``): docs/results.md has them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clone import Clone, a_clone
from tests.integration.rack import PROGRAMS, TINY, Attached, write_data
from tests.integration.support import execute, pause, succeed, wait_until
from tests.patience import STEP_S, WORK_S
from tridock.cli import fab, main
from tridock.contracts import heartbeat

# Faults that ranks on one machine show too (tests/distributed: run_supervisor, restart, triage).
also_on_one_machine = pytest.mark.full

HEAD, OTHER = "node-1", "node-2"
FOREVER = 10**6
LENGTH = {"train.train_iters": 240}
RANK = r"python[^ ]* -u -m tridock\.train "


@dataclass
class Twin:
    """The twin of a clone, one rank a node, and the runs on it."""

    clone: Clone
    started: list[str] = field(default_factory=list)

    def container(self, node: str) -> str:
        return f"{self.clone.twin}-{node}-1"

    def inside(self, node: str, script: str) -> str:
        return execute("docker", "exec", "--user", "tridock", self.container(node), "bash", "-c", script).stdout

    def signal(self, node: str, name: str, pattern: str) -> None:
        """To the one process there whose command matches; its children that have the same are left alone."""
        self.inside(node, f"pkill -o -{name} -f -- '{pattern}'")

    def end_session(self, node: str, pattern: str) -> None:
        """Kills the sshd process of the session that such a process runs in."""
        up = "p=$(ps -o ppid= -p $p | tr -d ' ')"
        script = f"p=$(pgrep -o -f -- '{pattern}'); until grep -q sshd /proc/$p/comm; do {up}; done; kill -9 $p"
        self.inside(node, script)

    def processes(self, run: Run, node: str) -> list[str]:
        script = 'grep -slzx "TRIDOCK_RUN_ID=$0" /proc/[0-9]*/environ'.replace("$0", run.run_id)
        return self.inside(node, script).split()

    @contextmanager
    def launched(self, stops_beyond: int | None = None, **fields: Any) -> Iterator[Run]:
        """A run that `tridock launch` is attached to; it trains when the block begins, and is stopped when it ends.

        After the iteration ``stops_beyond`` the other node's rank is stopped, so that the run does not come to its end
        before the test has done what it wants.
        """
        changes = {"train.train_iters": FOREVER, "train.log_interval": 1, "train.save": False, **fields}
        arguments = [word for name, value in changes.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        id_file, output = self.clone.folder / f"id-{time.time_ns()}", self.clone.folder / f"out-{time.time_ns()}"
        argv = [
            str(PROGRAMS / "fab"),
            "launch",
            "--hosts",
            "hostfiles/twin",
            "--config",
            "configs/tiny.yaml",
            "--share",
            *arguments,
        ]
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "TRIDOCK_"))}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*argv, "--run-id-file", str(id_file)], cwd=self.clone.folder, stdin=subprocess.DEVNULL,
                env={**keep, "PYTHONPATH": str(self.clone.folder)}, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        attached = Attached(process, output)
        try:
            wait_until(lambda: id_file.exists() or process.poll() is not None, "the run has an id")
            assert id_file.exists(), attached.text()
            run = Run(self, id_file.read_text().strip(), attached)
            if stops_beyond is None:
                run.wait_for_training()
            else:
                run.stop_other(stops_beyond)
            yield run
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if id_file.exists():
                self.clone.run("fab", "stop", "--hosts", "hostfiles/twin", "--run", id_file.read_text().strip())


@dataclass
class Run:
    twin: Twin
    run_id: str
    terminal: Attached

    @property
    def folder(self) -> Path:
        return self.twin.clone.folder / "runs" / self.run_id

    def wait_for_training(self, beyond: int = 4) -> None:
        """Until both ranks have ended more steps than it takes to learn how long a step is."""
        trained = False

        def trains() -> bool:
            nonlocal trained  # asked again, they might be saving
            beats = [heartbeat.read(self.folder, rank) for rank in (0, 1)]
            trained = all(beat and beat.phase == "train" and beat.iteration > beyond for beat in beats)
            return trained

        wait_until(lambda: trains() or self.terminal.process.poll() is not None, "its ranks train", WORK_S)
        assert trained, self.terminal.text()

    def stop_other(self, beyond: int, rank: int = 1) -> None:
        """Stops the other node's rank, for which the head's waits, in mid-training.

        Inside the node: asked from here on a busy machine, the run could be over between two answers.
        """
        beat = f"/workspace/runs/{self.run_id}/{heartbeat.FOLDER}/rank-{rank}"
        past = f'[ "$phase" = train ] && [ "$iteration" -gt {beyond} ]'
        script = f'until read -r _ _ _ iteration phase _ <"{beat}" && {past}; do sleep 0.02; done 2>/dev/null'
        process = f"{RANK}.*{self.run_id}"
        self.twin.inside(OTHER, f"timeout {STEP_S} bash -c {shlex.quote(script)} && pkill -o -STOP -f -- '{process}'")
        stopped = f"pgrep -o -r T -f -- '{process}'"
        wait_until(lambda: self.twin.inside(OTHER, stopped) != "", "its rank on the other node is stopped")

    def continue_other(self) -> None:
        self.twin.signal(OTHER, "CONT", f"{RANK}.*{self.run_id}")

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if not names or event["event"] in names]

    def ends(self) -> tuple[int, str]:
        """The launch ends: its exit code and its verdict, or its last line; nothing of the run is left."""
        began = time.monotonic()
        code = self.terminal.process.wait(timeout=WORK_S)
        print(f"`fab launch` ended {time.monotonic() - began:.1f} s after the fault")
        lines = self.terminal.text().splitlines()
        # Beneath it stands why.
        return code, next((line for line in lines if ": the run failed; got " in line), lines[-1])

    def losses(self) -> dict[int, float]:
        """By iteration; none stands in the file twice."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        logged = [line for line in lines if "split" not in line]
        found = {line["iteration"]: line["loss"] for line in logged}
        assert len(found) == len(logged)
        return found

    def is_gone(self, node: str) -> bool:
        return self.twin.processes(self, node) == []

    def says(self, code: int, text: str, rank: int = 0) -> str:
        """The pattern of the verdict of `tridock launch`."""
        where = re.escape(f"look at {self.folder}/logs, or tridock logs --hosts hostfiles/twin --run {self.run_id}")
        return f"{self.run_id}: the run failed; got exit code {code}, {text}; {where} --rank {rank}"


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    with a_clone(tmp_path_factory.mktemp("faults"), cpu_image) as clone:
        (clone.folder / "configs" / "tiny.yaml").write_text(json.dumps(TINY | {"parallel": {"strategy": "ddp"}}))
        (clone.folder / "hostfiles" / "twin").write_text(f"{HEAD} slots=1\n{OTHER} slots=1\n")
        write_data(clone.folder / "data" / "tiny")
        clone.succeed("fab up --hosts hostfiles/twin")
        yield Twin(clone)


# ---- ranks and launchers; a second run beside them notices nothing -------------------------------


@pytest.fixture(scope="module")
def neighbour(twin: Twin) -> Iterator[Run]:
    """Another run on the same nodes: paused in its middle, so that it takes no processor, and continued at the end."""
    with twin.launched(stops_beyond=1, **LENGTH, **{"launch.hang_timeout": 0}) as run:
        twin.signal(HEAD, "STOP", f"{RANK}.*{run.run_id}")
        yield run


@pytest.fixture(scope="module")
def calm(twin: Twin, neighbour: Run) -> Run:
    """The neighbour, let go and come to its end."""
    for node in (HEAD, OTHER):
        twin.signal(node, "CONT", f"{RANK}.*{neighbour.run_id}")
    assert neighbour.terminal.process.wait(timeout=WORK_S) == 0, neighbour.terminal.text()
    return neighbour


@pytest.fixture
def beside(twin: Twin, neighbour: Run) -> Iterator[None]:
    before = {node: twin.processes(neighbour, node) for node in (HEAD, OTHER)}
    assert all(before.values())
    yield
    assert {node: twin.processes(neighbour, node) for node in (HEAD, OTHER)} == before


@pytest.mark.full  # test_run.py kills one too, tests/distributed/test_run_supervisor.py has each signal
@pytest.mark.usefixtures("beside")
def test_a_rank_that_is_killed(twin: Twin) -> None:
    with twin.launched() as run:
        twin.signal(OTHER, "KILL", f"{RANK}.*{run.run_id}")
        code, last = run.ends()
        assert code == 4
        assert re.fullmatch(run.says(4, r"rank 1 on node-2 was ended by SIGKILL after iteration \d+", 1), last), last
        assert run.is_gone(HEAD)
        assert run.is_gone(OTHER)
        assert (run.folder / "exit_code").read_text() == "4\n"


@also_on_one_machine
@pytest.mark.usefixtures("beside")
def test_a_rank_that_is_stopped(twin: Twin) -> None:
    with twin.launched() as run:
        twin.signal(OTHER, "STOP", f"{RANK}.*{run.run_id}")
        code, last = run.ends()
        text = r"rank 1 on node-2 is stopped \(SIGSTOP, or a debugger\); no progress for \d+ s \(limit \d+ s\), .*"
        assert code == 4
        assert re.fullmatch(run.says(4, text, 1), last), last
        assert run.is_gone(HEAD)
        assert run.is_gone(OTHER)


@also_on_one_machine
@pytest.mark.usefixtures("beside")
def test_a_launcher_that_is_killed(twin: Twin) -> None:
    with twin.launched() as run:
        twin.signal(HEAD, "KILL", f"tridock.node start-nodes .*{run.run_id}")
        code, last = run.ends()
        assert code == 4
        assert re.fullmatch(run.says(137, "the launcher was ended by SIGKILL"), last), last
        assert run.is_gone(HEAD)
        assert run.is_gone(OTHER)


@pytest.mark.full  # tests/distributed/test_run_supervisor.py: a watch that is killed; below: a network that is cut
@pytest.mark.parametrize(
    ("launcher", "command", "says"),
    [
        ("ssh", "tridock.node start-ranks --run", "tridock: launch-ranks.sh ended with exit code 255 on node-2\n"),
        ("deepspeed", "deepspeed.launcher.launch", "pdsh@node-1: node-2: ssh exited with exit code 255\n"),
    ],
    ids=("ssh", "deepspeed"),
)
@pytest.mark.usefixtures("beside")
def test_sessions_that_are_killed_do_not_end_a_run(twin: Twin, launcher: str, command: str, says: str) -> None:
    """The node agents are restarted; the launcher's ranks continue without them, and their exit codes count."""
    changes = {"train.train_iters": 600, "launch.launcher": launcher, "launch.hang_timeout": WORK_S}
    with twin.launched(stops_beyond=1, **changes) as run:
        watch = f"tridock.node agent .*{run.run_id} {OTHER}"
        watching = f"pgrep -o -f -- '{watch}'"
        wait_until(lambda: twin.inside(OTHER, watching) != "", "the other node is watched")
        first = twin.inside(OTHER, watching)
        twin.end_session(OTHER, watch)
        twin.end_session(OTHER, f"{command} .*{run.run_id}")
        wait_until(lambda: twin.inside(OTHER, f"pgrep -n -f -- '{watch}'") not in ("", first), "another watch")
        run.continue_other()
        assert run.terminal.process.wait(timeout=WORK_S) == 0, run.terminal.text()
        assert says in run.terminal.text()
        assert [event["event"] for event in run.events("node_lost", "head_lost", "launcher_ended")] == []
        assert run.is_gone(OTHER)


@also_on_one_machine
@pytest.mark.usefixtures("beside")
def test_a_supervisor_that_is_killed(twin: Twin) -> None:
    with twin.launched() as run:
        twin.signal(HEAD, "KILL", f"tridock.node start .*{run.run_id}")
        began = time.monotonic()
        code, last = run.ends()
        assert code == 4
        assert last.startswith(f"{run.run_id}: the run failed; got exit code 4")
        assert "was lost: nothing supervises it and no exit code was written" in run.terminal.text()
        wait_until(lambda: run.is_gone(HEAD) and run.is_gone(OTHER), "the ranks have ended by themselves")
        print(f"without a supervisor, the ranks ended after {time.monotonic() - began:.1f} s")
        assert {event["node"] for event in run.events("head_lost")} == {HEAD, OTHER}
        assert re.search(rf"{run.run_id} +│ 2 +│ lost ", twin.clone.succeed("fab status --hosts hostfiles/twin"))


REFUSED = {
    **dict.fromkeys(("up", "keys", "check", "runs", "status", "stop", "logs", "cancel", "triage", "fetch"), ()),
    "down": ("--force",),
    "launch": ("--config", "configs/tiny.yaml"),
    "run": ("--", "true"),
    "reproduce": ("a",),
    "resume": ("--run", "a"),
    "report": ("--run", "a"),
    "data": ("--config", "configs/tiny.yaml"),
}


@pytest.mark.usefixtures("beside")
def test_another_clone_has_a_twin_of_its_own(
    twin: Twin, neighbour: Run, cpu_image: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Even of the same name: no command there touches or lists what is here. In the same Compose project all refuse."""
    here = twin.clone
    assert {*fab.COMMANDS} - {*REFUSED} == {"plan", "watch"}

    def task(clone: Clone, name: str, *arguments: str) -> tuple[int, str]:
        """Runs a task in a clone, without a process of its own; returns the exit code, and what it says."""
        monkeypatch.chdir(clone.folder)
        return main([*fab.COMMANDS[name], "--hosts", "hostfiles/twin", *arguments]), "".join(capsys.readouterr())

    def containers() -> list[str]:
        form = "{{.ID}} {{.Names}} {{.State}}"
        return succeed("docker", "ps", "--all", "--format", form, "--filter", f"name={here.twin}-").splitlines()

    before = containers()
    assert [line.split()[-1] for line in before] == ["running", "running"]
    with a_clone(tmp_path, cpu_image) as other:
        (other.folder / "hostfiles" / "twin").write_text(f"{HEAD} slots=1\n")
        shutil.copy(here.folder / "configs" / "tiny.yaml", other.folder / "configs")
        write_data(other.folder / "data" / "tiny")
        settings = other.folder / "hostfiles" / "twin.yaml"
        of_the_same_name = settings.read_text().replace(f"\nname: {other.name}\n", f"\nname: {here.name}\n")
        assert of_the_same_name != settings.read_text()
        settings.write_text(of_the_same_name)
        try:
            code, said = task(other, "up")
            assert (code, said.startswith("1 node up")) == (0, True), said
            code, said = task(other, "status")
            assert (code, "running" in said, neighbour.run_id in said) == (0, True, False), said
            for arguments in ((), ("--run", neighbour.run_id)):
                code, said = task(other, "stop", *arguments)
                assert code == 2, said
        finally:
            assert task(other, "down") == (0, f"removed {HEAD}\n")
        assert containers() == before

        settings.write_text(f"{of_the_same_name}\ncompose: {{project: {here.twin}}}\n")
        refusal = (
            f"its container {here.twin}-{HEAD}-1 is not this cluster's; got that of {here.folder}, and this one's is "
            f"{other.folder}; use its folder"
        )
        for name, arguments in REFUSED.items():
            code, said = task(other, name, *arguments)
            assert (code, refusal in said) == (3, True), f"{name}: {said}"
    assert containers() == before
    assert f"{neighbour.run_id} " in task(here, "status")[1]


def test_the_neighbour_continues_to_its_end(calm: Run) -> None:
    assert [event["event"] for event in calm.events("run_failed", "rank_died", "rank_hung", "node_lost")] == []
    assert len(calm.losses()) == LENGTH["train.train_iters"]


# ---- nodes that vanish ---------------------------------------------------------------------------


def test_a_node_whose_network_is_cut_and_that_comes_back(twin: Twin, calm: Run) -> None:
    """Named in time; the run continues once the node answers again, to the losses of the one that was left alone."""
    network, container = f"{twin.clone.twin}_default", twin.container(OTHER)
    save = {"train.save": True, "train.save_interval": 20, "restart.max": 1, "launch.hang_timeout": WORK_S}
    with twin.launched(stops_beyond=45, **LENGTH, **save) as run:
        wait_until(lambda: run.events("checkpoint_saved") != [], "a checkpoint is whole")
        succeed("docker", "network", "disconnect", network, container)
        began = time.monotonic()
        run.continue_other()
        wait_until(lambda: run.events("node_lost") != [], "the node is missed")
        print(f"a node without network was named after {time.monotonic() - began:.1f} s")
        (event,) = run.events("node_lost")
        assert event["node"] == OTHER
        assert re.match(r"has not answered for 2\d s", event["reason"])
        wait_until(lambda: run.is_gone(OTHER), "its ranks have ended by themselves")
        print(f"cut off, its ranks ended after {time.monotonic() - began:.1f} s")
        succeed("docker", "network", "connect", "--alias", OTHER, network, container)
        began = time.monotonic()
        wait_until(lambda: run.events("run_restarted") != [], "the run continues")
        print(f"once the node was back, the run went on after {time.monotonic() - began:.1f} s")
        assert run.terminal.process.wait(timeout=WORK_S) == 0, run.terminal.text()
        assert run.events("run_restarted")[0]["iteration"] % 20 == 0
        assert run.events("run_restarted")[0]["iteration"] > 0
        assert run.losses() == calm.losses()


@pytest.mark.full  # a head that is lost: the last test
def test_a_head_that_stands_still_while_it_is_followed(twin: Twin) -> None:
    with twin.launched() as run:
        pause(twin.container(HEAD))
        try:
            code, last = run.ends()
            assert (code, last) == (
                3,
                f"{HEAD}: has said nothing for 20 s while {run.run_id} was followed; the nodes that have lost it end "
                "their ranks by themselves; see tridock status once it is back",
            )
            wait_until(lambda: run.is_gone(OTHER), "the other node's ranks have ended by themselves")
        finally:
            succeed("docker", "unpause", twin.container(HEAD))
        wait_until((run.folder / "exit_code").exists, "the supervisor has found out")
        assert (run.folder / "exit_code").read_text() == "4\n"
        assert run.is_gone(HEAD)


@pytest.mark.full  # test_moved_runs.py kills one too
def test_a_node_that_is_killed(twin: Twin) -> None:
    with twin.launched() as run:
        succeed("docker", "kill", twin.container(OTHER))
        code, last = run.ends()
        assert code == 4
        text = r"node-2 (has not answered for 2\d s|dropped the ssh session in which its ranks were started).*"
        assert re.fullmatch(run.says(4, text), last), last
        assert run.is_gone(HEAD)


@pytest.mark.full  # a head that is lost: the last test
def test_a_head_that_is_killed_while_it_is_followed(twin: Twin) -> None:
    twin.clone.succeed("fab up --hosts hostfiles/twin")
    with twin.launched() as run:
        succeed("docker", "kill", twin.container(HEAD))
        code, last = run.ends()
        assert (code, last) == (
            3,
            f"{HEAD}: its node ended while {run.run_id} was followed; got exit code 137; the nodes that have lost it "
            "end their ranks by themselves; see tridock status once it is back",
        )
        began = time.monotonic()
        wait_until(lambda: run.is_gone(OTHER), "the other node's ranks have ended by themselves")
        print(f"without the head, the other node's ranks ended after {time.monotonic() - began:.1f} s")
        twin.clone.succeed("fab up --hosts hostfiles/twin")
        assert re.search(rf"{run.run_id} +│ 2 +│ lost ", twin.clone.succeed("fab status --hosts hostfiles/twin"))
