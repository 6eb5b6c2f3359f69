"""A host's shell that waits for the next command, over a real sshd."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.integration.sshd import Sshd, message, running, wait_until
from tridock.command import Command
from tridock.remote.files import put_texts_command
from tridock.remote.host import Completed
from tridock.remote.kept import KEEP
from tridock.remote.ssh import SshHost


@pytest.fixture
def host(shared: Sshd) -> Iterator[SshHost]:
    made = shared.host()
    yield made
    made.close()


def first(host: SshHost, keep: float = 60, mark: str = "") -> Completed:
    return host.run(Command.of("sh", "-c", f"echo facts # {mark}\n{KEEP}"), timeout=10, keep=keep)


def sessions(sshd: Sshd) -> int:
    return sshd.log.count("Starting session")


def test_the_next_commands_start_no_session(host: SshHost, shared: Sshd, tmp_path: os.PathLike[str]) -> None:
    before = sessions(shared)
    assert [first(host) for _ in range(2)] == [Completed(0, b"facts\n", b"")] * 2
    put = put_texts_command({"a": b"text\n" * 20_000}, f"{tmp_path}/keys")
    assert host.run(put, timeout=10, keep=60).exit_code == 0
    content = os.urandom(3_000_000)
    done = host.run(Command.of("sh", "-c", "cat; echo why >&2; exit 3", stdin=content), timeout=10)
    assert (done.exit_code, done.stdout, done.stderr) == (3, content, b"why\n")
    assert sessions(shared) == before + 1
    assert host.run(Command.of("cat", f"{tmp_path}/keys/a"), timeout=10).stdout == b"text\n" * 20_000
    assert sessions(shared) == before + 2


def test_a_command_without_a_time_limit_or_with_a_longer_one_starts_a_session(host: SshHost, shared: Sshd) -> None:
    first(host)
    before = sessions(shared)
    assert host.run(Command.of("echo", "x")).stdout == b"x\n"
    assert host.run(Command.of("echo", "x"), timeout=71).stdout == b"x\n"
    assert sessions(shared) == before + 2


def test_a_shell_that_is_gone_is_not_missed(host: SshHost, shared: Sshd) -> None:
    mark = f"gone {os.getpid()}"
    first(host, mark=mark)
    for pid in running(f"^sh -c echo facts # {mark}"):
        os.kill(int(pid), 15)
    wait_until(lambda: host._kept[0].channel.closed or host._kept[0].channel.eof_received)
    assert host.run(Command.of("echo", "x"), timeout=10).stdout == b"x\n"
    first(host)
    shared.end_sessions()
    wait_until(lambda: host._kept[0].channel.closed)
    assert host.run(Command.of("echo", "x"), timeout=10).stdout == b"x\n"


def test_a_command_that_hangs_in_it_is_ended_there_too(host: SshHost) -> None:
    first(host, mark=f"slow {os.getpid()}")
    number = f"7{os.getpid()}"
    assert message(lambda: host.run(Command.of("sleep", number), timeout=1)) == (
        f"node-1: `sleep {number}` did not end within 1 s; see what delays it there, then try again"
    )
    wait_until(lambda: not running(f"^sleep {number}$") and not running(f"facts # slow {os.getpid()}"), 30)
    assert host.run(Command.of("echo", "fine"), timeout=20).stdout == b"fine\n"


def test_it_ends_with_the_connection_and_with_its_time(shared: Sshd) -> None:
    mark = f"idle {os.getpid()}"
    host = shared.host()
    first(host, mark=mark)
    assert running(f"facts # {mark}")
    host.close()
    wait_until(lambda: not running(f"facts # {mark}"), 20)
    began = time.monotonic()
    host.run(Command.of("sh", "-c", f"echo facts # {mark}\n{KEEP}"), timeout=1, keep=1)
    wait_until(lambda: not running(f"facts # {mark}"), 30)
    assert time.monotonic() - began > 2
    host.close()


def test_a_connection_that_is_lost_while_a_command_runs_in_it(host: SshHost, shared: Sshd) -> None:
    first(host)
    marker = Command.of("sh", "-c", "echo begun; sleep 30")

    def begun(_: bytes) -> None:
        shared.end_sessions()

    text = message(lambda: host.read_into(begun, marker, timeout=20))
    assert text.startswith("node-1: the connection was lost while `sh -c 'echo begun; sleep 30'` ran; got ")
