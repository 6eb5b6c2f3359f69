"""An attached command ends with the process that started it, and one command at a time changes a cluster's nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tridock.command import Command
from tridock.errors import ClusterError
from tridock.ops.hosts.attached import AWAIT_KEEPALIVES, AttachedCommand, nodes_locked
from tridock.ops.hosts.session import Session
from tridock.remote import LocalHost

LOCKS = (
    "import sys, time; from pathlib import Path; from tests.unit.ops.test_attached import session; "
    "from tridock.ops.hosts.attached import nodes_locked\n"
    "with nodes_locked(session(Path(sys.argv[1]))): print('locked', flush=True); time.sleep(600)"
)


def session(folder: Path) -> Session:
    """Of a cluster whose only host is this machine, in this folder."""
    (folder / "lab").write_text("gpu-1 slots=1\n")
    (folder / "lab.yaml").write_text(f"workdir: {folder}/there\n")
    made = Session.open(folder / "lab")
    made.hosts = {"gpu-1": LocalHost("gpu-1")}
    return made


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_attached_command_ends_when_it_is_released(tmp_path: Path) -> None:
    script = f"trap 'echo ended >{tmp_path}/end' EXIT; echo one; echo two; {AWAIT_KEEPALIVES}"
    ended: list[bool] = []
    attached = AttachedCommand(LocalHost(), Command.of("sh", "-c", script), "it fails", lambda: ended.append(True))
    assert [attached.line(10), attached.line(10)] == ["one", "two"]
    assert not (tmp_path / "end").exists()
    attached.end()
    assert (tmp_path / "end").read_text() == "ended\n"
    assert ended == []


def test_an_attached_command_that_ends_by_itself_says_why() -> None:
    ended: list[bool] = []
    command = Command.of("sh", "-c", "echo one; echo no room >&2; exit 3")
    attached = AttachedCommand(LocalHost("gpu-1"), command, "it fails", lambda: ended.append(True))
    assert attached.line(10) == "one"
    with pytest.raises(ClusterError) as caught:
        attached.line(10)
    assert str(caught.value) == "gpu-1: it fails; got no room; fix that there, then try again"
    assert ended == [True]


def test_the_second_command_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = session(tmp_path), session(tmp_path)
    entered = threading.Event()

    def enter() -> None:
        with nodes_locked(second):
            entered.set()

    with nodes_locked(first):
        thread = threading.Thread(target=enter)
        thread.start()
        wait_until(lambda: capsys.readouterr().err == "another command changes the nodes of lab; waiting for it\n")
        assert not entered.is_set()
    assert entered.wait(20)
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
    with nodes_locked(session(tmp_path)):
        pass


def test_a_host_where_nothing_can_be_written_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file, not a folder")
    with pytest.raises(ClusterError) as caught, nodes_locked(session(tmp_path)):
        pass
    assert re.fullmatch(
        "gpu-1: the cluster's nodes cannot be locked; got mkdir: cannot create directory .*/there.: File exists; "
        "fix that there, then try again",
        str(caught.value),
    )
