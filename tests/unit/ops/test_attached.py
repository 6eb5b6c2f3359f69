"""An attached command ends with the process that started it, and one command at a time changes a cluster's nodes."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.patience import STEP_S
from tests.unit.ops.conftest import program
from tridock.cluster.settings import load_cluster
from tridock.command import Command
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.attached import AWAIT_KEEPALIVES, AttachedCommand, NodesLock, nodes_locked
from tridock.ops.hosts.hosts import Hosts
from tridock.remote import LocalHost

LOCKS = (
    "import sys, time; from pathlib import Path; from tests.unit.ops.test_attached import hosts_of; "
    "from tridock.ops.hosts.attached import nodes_locked\n"
    "with nodes_locked(hosts_of(Path(sys.argv[1]))): print('locked', flush=True); time.sleep(600)"
)


def hosts_of(folder: Path) -> Hosts:
    """Of a cluster whose only host is this machine, in this folder."""
    (folder / "lab").write_text("gpu-1 slots=1\n")
    (folder / "lab.yaml").write_text(f"workdir: {folder}/there\n")
    return Hosts(load_cluster(folder / "lab"), {"gpu-1": LocalHost("gpu-1")})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STEP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_attached_command_ends_when_it_is_released(tmp_path: Path) -> None:
    script = f"trap 'echo ended >{tmp_path}/end' EXIT; echo one; echo two; {AWAIT_KEEPALIVES}"
    attached = AttachedCommand(LocalHost(), Command.of("sh", "-c", script), "it fails")
    assert [attached.line(10), attached.line(10)] == ["one", "two"]
    assert not (tmp_path / "end").exists()
    attached.end()
    assert (tmp_path / "end").read_text() == "ended\n"


def test_an_attached_command_that_ends_by_itself_says_why() -> None:
    command = Command.of("sh", "-c", "echo one; echo no room >&2; exit 3")
    attached = AttachedCommand(LocalHost("gpu-1"), command, "it fails")
    assert attached.line(10) == "one"
    with pytest.raises(ClusterError) as caught:
        attached.line(10)
    assert str(caught.value) == "gpu-1: it fails; got no room; fix that there, then try again"


def test_the_second_command_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    first, second = hosts_of(tmp_path), hosts_of(tmp_path)
    entered = threading.Event()

    def enter() -> None:
        with nodes_locked(second):
            entered.set()

    with nodes_locked(first):
        thread = threading.Thread(target=enter)
        thread.start()
        who = re.escape(f"{os.environ.get('USER', 'somebody')} on {socket.gethostname()}, process {os.getpid()}")
        said = rf"another command \({who}\) changes the nodes of lab; waiting for it\n"
        wait_until(lambda: re.fullmatch(said, shown.getvalue()) is not None)
        assert not entered.is_set()
    assert entered.wait(STEP_S)
    thread.join()


def test_a_command_that_was_killed_holds_up_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKS, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with nodes_locked(hosts_of(tmp_path)):
        pass


def test_a_host_where_nothing_can_be_written_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file, not a folder")
    with pytest.raises(ClusterError) as caught, nodes_locked(hosts_of(tmp_path)):
        pass
    assert re.fullmatch(
        r"gpu-1: the cluster's nodes cannot be locked \(.*/there/nodes.lock\); got mkdir: "
        "cannot create directory .*/there.: File exists; "
        "fix that there, then try again",
        str(caught.value),
    )


def test_a_lock_that_hangs_ends_with_its_host_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file server whose lock daemon does not answer."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "flock", "exec sleep 9999")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("tridock.ops.hosts.attached.FIRST_LINE_S", 1)
    made = hosts_of(tmp_path)
    monkeypatch.setattr("tridock.ops.hosts.attached.read_states", lambda _: {})
    with pytest.raises(ClusterError) as caught, nodes_locked(made):
        pass
    assert str(caught.value) == (
        f"gpu-1: the cluster's nodes cannot be locked ({tmp_path}/there/nodes.lock); got no answer within 1 s; "
        "see what delays it there, then try again"
    )


def test_what_fails_in_the_thread_reaches_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = hosts_of(tmp_path)
    problem = RequestError(Problem("gpu-1", "ssh cannot read its configuration", "line 1", "fix what it names"))
    monkeypatch.setattr(made["gpu-1"], "read_into", Mock(side_effect=problem))
    with pytest.raises(RequestError, match="ssh cannot read its configuration"), nodes_locked(made):
        pass


def test_a_command_whose_claim_another_has_taken_changes_nothing(tmp_path: Path) -> None:
    """Also one that has lost the lock without knowing, as its machine slept."""
    first, second = hosts_of(tmp_path), hosts_of(tmp_path)
    early, late = NodesLock(first), NodesLock(second)
    with ExitStack() as held:
        for lock in (early, late):
            command = lock.take()
            held.callback(command.end)
            if lock is early:
                assert command.line(20) == "locked"
                lock.claim()
                assert lock.run("gpu-1", Command.of("echo", "one"), 20.0).stdout == b"one\n"
                command.end()  # as after a minute without a sign of life
            else:
                assert command.line(20) == "locked"
        # The later one has the lock, and has changed nothing yet.
        with pytest.raises(ClusterError, match="another command has changed the cluster's nodes since"):
            early.claim()
        late.claim()
        with pytest.raises(ClusterError, match="gpu-1: another command has changed the cluster's nodes since"):
            early.run("gpu-1", Command.of("touch", f"{tmp_path}/changed"), 20.0)
        assert not (tmp_path / "changed").exists()
        assert late.run("gpu-1", Command.of("echo", "two"), 20.0).stdout == b"two\n"
