"""Commands and files on a host, over a real sshd on loopback and on this machine: what works, and what does not."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sshd import ROOT, Sshd, message, running, wait_until
from tests.patience import STEP_S
from tridock.command import Command
from tridock.remote import Host, LocalHost

# ---- what works ------------------------------------------------------------------------------------------------------


def test_a_command_arrives_word_by_word(host: Host) -> None:
    arguments = ["a b", "", "$HOME", "`id`", "'", '"', "\\", "*", ";", "\n", "ä", "-n", "~"]
    done = host.run(Command.of("printf", "%s\\0", *arguments), timeout=STEP_S)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in arguments)
    assert (done.exit_code, done.stderr) == (0, b"")


def test_environment_folder_and_exit_code(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    script = 'echo "$X"; pwd; echo oops >&2; exit 3'
    done = host.run(Command(("sh", "-c", script), env={"X": "a 'b' $c"}, cwd=str(folder)))
    assert (done.exit_code, done.stdout.decode(), done.stderr) == (3, f"a 'b' $c\n{folder}\n", b"oops\n")


def test_bytes_go_through_unchanged_in_both_directions(host: Host) -> None:
    content = bytes(range(256)) + os.urandom(6_000_000)
    assert host.run(Command.of("cat", stdin=content), timeout=STEP_S).stdout == content
    done = host.run(Command.of("sh", "-c", "cat >&2", stdin=content), timeout=STEP_S)
    assert (done.stdout, done.stderr) == (b"", content)


def test_without_input_a_command_sees_its_end(host: Host) -> None:
    assert host.run(Command.of("cat"), timeout=STEP_S).stdout == b""


def test_a_command_that_reads_nothing_of_its_input(host: Host) -> None:
    done = host.run(Command.of("sh", "-c", "exit 5", stdin=b"x" * 20_000_000), timeout=STEP_S)
    assert done.exit_code == 5


def test_many_commands_at_once_on_one_host(host: Host) -> None:
    results: list[bytes] = []

    def work(number: int) -> None:
        results.append(host.run(Command.of("sh", "-c", f"sleep 0.2; echo {number}"), timeout=STEP_S).stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [b"%d\n" % number for number in range(8)]


def test_putting_and_getting_a_file(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "it's a file"
    content = bytes(range(256)) * 10
    host.put_tree({path.name: content}, str(path.parent), mode=0o640)
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o7777 == 0o640
    host.put_tree({path.name: b""}, str(path.parent), mode=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (b"", 0o600)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_home_is_the_hosts_own(host: Host, shared: Sshd) -> None:
    name, home = f".tridock-test-{os.getpid()}", Path.home() if isinstance(host, LocalHost) else shared.home
    try:
        host.put_tree({"file": b"x"}, f"~/{name}")
        assert (home / name / "file").read_bytes() == b"x"
    finally:
        shutil.rmtree(home / name, ignore_errors=True)


def test_a_reader_sees_the_old_file_or_the_new_one(host: Host, tmp_path: Path) -> None:
    path, contents = tmp_path / "file", (b"a" * 300_000, b"b" * 500_000)
    host.put_tree({"file": contents[0]}, str(tmp_path))
    seen, done = set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    looker = threading.Thread(target=look)
    looker.start()
    for turn in range(6):
        host.put_tree({"file": contents[turn % 2]}, str(tmp_path))
    done.set()
    looker.join()
    assert seen <= set(contents)


def test_putting_where_it_cannot_be(host: Host, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    text = message(lambda: host.put_tree({"folder": b"x"}, str(tmp_path)))
    assert text.startswith(f"node-1: `write into {tmp_path}` failed with exit code 1; got mv: ")
    (tmp_path / "file").touch()
    text = message(lambda: host.put_tree({"below": b"x"}, str(tmp_path / "file")))
    assert text.startswith(f"node-1: `write into {tmp_path}/file` failed with exit code 1; got ")
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["file", "folder"]


def test_a_tree_in_one_go(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "run 1"
    files = {"a": b"1", "logs/deep/b c": b"2" * 100_000, "-n": b"", "it's": b"\0"}
    host.put_tree(files, str(folder), mode=0o600)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == files
    assert {path.stat().st_mode & 0o7777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o7777 for path in (folder, folder / "logs")} == {0o700}
    assert abs((folder / "a").stat().st_mtime - time.time()) < STEP_S
    inode = folder.stat().st_ino
    host.put_tree({"a": b"new"}, str(folder), mode=0o644)
    assert ((folder / "a").read_bytes(), (folder / "a").stat().st_mode & 0o7777) == (b"new", 0o644)
    assert (folder.stat().st_ino, (folder / "logs/deep/b c").exists()) == (inode, True)
    folder.chmod(0o755)
    host.put_tree({"a": b"private"}, str(folder), mode=0o600)
    assert folder.stat().st_mode & 0o7777 == 0o700


def once_there(path: Path) -> str:
    """A shell's wait for a file that the test makes."""
    return f"until [ -e '{path}' ]; do sleep 0.05; done"


def test_output_comes_as_it_is_written(host: Host, tmp_path: Path) -> None:
    seen = []
    stream = host.stream(Command.of("sh", "-c", f"echo one; {once_there(tmp_path / 'one')}; echo two >&2; exit 9"))
    for part in stream:
        seen.append(part)
        (tmp_path / "one").touch()  # without it there is no second part
    assert seen == [b"one\n", b"two\n"]
    assert stream.exit_code == 9


def test_a_stream_can_be_left(host: Host) -> None:
    stream = host.stream(Command.of("sh", "-c", "echo one; sleep 9997"))
    assert next(iter(stream)) == b"one\n"
    stream.close()
    assert host.run(Command.of("echo", "still here"), timeout=STEP_S).stdout == b"still here\n"


def test_a_pipe_waits_for_a_slow_reader_and_tells_how_far_it_is(host: Host, tmp_path: Path) -> None:
    chunks, size = 60, 500_000
    sent: list[int] = []
    early: list[int] = []

    def look() -> None:
        early.append(sum(sent))
        (tmp_path / "looked").touch()

    timer = threading.Timer(1.0, look)
    timer.start()
    command = Command.of("sh", "-c", f"{once_there(tmp_path / 'looked')}; wc -c")
    done = host.pipe((b"x" * size for _ in range(chunks)), command, sent.append)
    assert int(done.stdout) == sum(sent) == chunks * size
    # What is under way is bounded by the transport's window, not by the size of the image.
    assert early[0] < chunks * size / 4


def test_a_source_that_breaks_off_is_not_taken_for_a_whole(host: Host, tmp_path: Path) -> None:
    def source() -> Iterator[bytes]:
        yield b"x" * 1000
        time.sleep(0.3)
        raise RuntimeError("disk gone")

    marker = tmp_path / "complete"
    with pytest.raises(RuntimeError, match=r"^disk gone$"):
        host.pipe(source(), Command.of("sh", "-c", f"cat >/dev/null; sleep 20; echo whole >'{marker}'"))
    wait_until(lambda: not running(f"echo whole >'{marker}'"))
    assert not marker.exists()


def test_output_too_large_for_memory_goes_to_a_file(host: Host, tmp_path: Path) -> None:
    """More of it than this process may hold beside it; the errors come apart from it."""
    size = 150_000_000
    script = f"head -c {size} /dev/zero; echo oops >&2; exit 3"
    command = Command.of("sh", "-c", script, stdin=b"ignored")
    tracemalloc.start()
    try:
        with (tmp_path / "file").open("wb") as file:
            done = host.read_into(file.write, command, timeout=STEP_S)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"", b"oops\n")
    assert ((tmp_path / "file").stat().st_size, most < size / 4) == (size, True)


def test_read_into_keeps_the_order_and_every_byte(host: Host) -> None:
    content = bytes(range(256)) + os.urandom(6_000_000)
    parts: list[bytes] = []
    done = host.read_into(parts.append, Command.of("cat", stdin=content), timeout=STEP_S)
    assert (done.exit_code, b"".join(parts)) == (0, content)


def test_pieces_come_as_they_are_written(host: Host, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def take(part: bytes) -> None:
        seen.append(part)
        (tmp_path / "one").touch()

    command = Command.of("sh", "-c", f"echo one; {once_there(tmp_path / 'one')}; echo two")
    host.read_into(take, command, timeout=STEP_S)
    assert seen == [b"one\n", b"two\n"]


# ---- what does not ---------------------------------------------------------------------------------------------------


def test_a_command_that_fails(host: Host) -> None:
    done = host.run(Command.of("sh", "-c", "echo one; echo two >&2; echo three >&2; exit 4"))
    assert message(lambda: done.checked("node-1")) == (
        "node-1: `sh -c 'echo one; echo two >&2; echo three >&2; exit 4'` failed with exit code 4; "
        "got two | three; fix that there, then try again"
    )


def test_a_command_that_is_not_there(host: Host) -> None:
    done = host.run(Command.of("no-such-program", "x"), timeout=STEP_S)
    assert done.exit_code == 127
    text = message(lambda: done.checked("node-1"))
    assert text.startswith("node-1: `no-such-program x` failed with exit code 127; got ")
    assert text.endswith("; install it there, or put it on the PATH that ssh commands have")


def test_a_command_that_hangs_is_ended_there_too(host: Host) -> None:
    number = f"9{os.getpid()}"
    assert message(lambda: host.run(Command.of("sleep", number), timeout=1)) == (
        f"node-1: `sleep {number}` did not end within 1 s; see what delays it there, then try again"
    )
    wait_until(lambda: not running(f"^sleep {number}$"))
    assert host.run(Command.of("echo", "fine"), timeout=STEP_S).stdout == b"fine\n"


def test_output_without_end_is_cut_at_the_time_limit(host: Host) -> None:
    number = f"8{os.getpid()}"
    command = Command.of("sh", "-c", f"while :; do sleep 0.1; echo x; done # {number}")
    parts: list[bytes] = []
    assert message(lambda: host.read_into(parts.append, command, timeout=4)) == (
        f"node-1: `sh -c 'while :; do sleep 0.1; echo x; done # {number}'` did not end within 4 s; "
        "see what delays it there, then try again"
    )
    assert b"".join(parts).startswith(b"x\nx\n")
    wait_until(lambda: not running(f"echo x; done # {number}"))


def test_a_sink_that_takes_no_more_ends_the_command(host: Host) -> None:
    number = f"7{os.getpid()}"
    command = Command.of("sh", "-c", f"while echo x; do sleep 0.1; done # {number}")

    def full(_: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        host.read_into(full, command)
    wait_until(lambda: not running(f"; done # {number}"))
    assert host.run(Command.of("echo", "fine"), timeout=STEP_S).stdout == b"fine\n"


def test_a_sink_that_times_out_itself_is_not_taken_for_the_command(host: Host) -> None:
    def slow(_: bytes) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        host.read_into(slow, Command.of("echo", "x"))


def test_reading_from_a_program_that_is_not_there(host: Host) -> None:
    parts: list[bytes] = []
    done = host.read_into(parts.append, Command.of("no-such-program", "x"), timeout=STEP_S)
    assert (done.exit_code, parts) == (127, [])
    assert done.stderr


def test_a_command_that_a_signal_ends(host: Host) -> None:
    done = host.run(Command.of("sh", "-c", "echo before; kill -9 $$"))
    assert (done.exit_code, done.stdout) == (137, b"before\n")
    assert message(lambda: done.checked("node-1")).endswith(
        "; look for what killed it there (dmesg, if memory ran out), then try again"
    )


@pytest.mark.parametrize("code", [1, 126, 127, 128, 254, 255])
def test_every_exit_code_is_the_commands_own(host: Host, code: int) -> None:
    """255 is also ssh's own for a connection that is lost."""
    assert host.run(Command.of("sh", "-c", f"exit {code}")).exit_code == code


@pytest.mark.parametrize(
    "work",
    [
        "on_all(hosts, lambda _, host: host.run(Command.of('sleep', '9996')), cap=2)",
        "list(hosts['a'].stream(Command.of('sleep', '9996')))",
        "hosts['a'].run(Command.of('sleep', '9996'))",
        "hosts['a'].pipe(iter(lambda: b'x' * 1000, None), Command.of('sleep', '9996'))",
        "hosts['a'].read_into(lambda part: None, Command.of('sleep', '9996'))",
        "hosts['a'].read_into(lambda part: None, Command.of('yes'))",
    ],
)
@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_ctrl_c_comes_through_at_once(shared: Sshd, kind: str, work: str) -> None:
    one = "LocalHost(name)" if kind == "local" else (
        f"SshHost(name, Login('127.0.0.1', port={shared.port}, identity_file={str(shared.client_key)!r}, "
        f"config_file={str(shared.ssh_config)!r}))"
    )  # fmt: skip
    script = textwrap.dedent(f"""
        import sys
        from tridock.command import Command
        from tridock.remote import LocalHost, on_all
        from tridock.remote.ssh import Login, SshHost
        hosts = {{name: {one} for name in 'abcd'}}
        for host in hosts.values():
            host.run(Command.of('true'))
        try:
            print('ready', flush=True)
            {work}
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=STEP_S)
    assert (process.returncode, errors) == (130, "")


def test_ctrl_c_leaves_no_lock_taken(shared: Sshd) -> None:
    # One that struck inside paramiko used to leave a lock taken, about once in fifteen times.
    script = textwrap.dedent(f"""
        import os, signal, threading
        from tridock.command import Command
        from tridock.remote.ssh import Login, SshHost
        host = SshHost('a', Login('127.0.0.1', port={shared.port}, identity_file={str(shared.client_key)!r},
                                  config_file={str(shared.ssh_config)!r}))
        for turn in range(40):
            host.run(Command.of('true'))
            try:
                threading.Timer(0.1 + turn * 0.0017, os.kill, (os.getpid(), signal.SIGINT)).start()
                host.read_into(lambda part: None, Command.of('yes'))
            except KeyboardInterrupt:
                print('once', flush=True)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=ROOT, text=True, timeout=STEP_S)
    assert (done.stderr, done.stdout, done.returncode) == ("", "once\n" * 40, 0)


def test_the_digest_of_a_large_transfer(shared: Sshd) -> None:
    block = os.urandom(1 << 20)
    digest = hashlib.sha256(block * 100).hexdigest()
    done = shared.host().pipe((block for _ in range(100)), Command.of("sha256sum"))
    assert done.stdout.decode().split()[0] == digest
