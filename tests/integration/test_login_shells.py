"""Users of a real sshd whose login shells, and start-up files, are not bash's of a fresh account."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.sshd import Sshd, message
from tests.patience import STEP_S
from tridock.command import Command
from tridock.remote.login_shell import script_line
from tridock.remote.ssh import SshHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can add users with other login shells")

SHELLS = ("bash", "dash", "zsh", "fish", "csh", "tcsh")
START_UP = {
    "bash": ".bashrc",
    "zsh": ".zshenv",
    "csh": ".cshrc",
    "tcsh": ".tcshrc",
    "fish": ".config/fish/config.fish",
}

Login = Callable[..., SshHost]


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def sshd(open_folder: Path) -> Iterator[Sshd]:
    made = Sshd(open_folder / "sshd", "MaxStartups 100\nMaxSessions 100", own_home=False)
    yield made.start()
    made.stop()


@pytest.fixture
def login(sshd: Sshd, open_folder: Path) -> Iterator[Login]:
    """Adds a user with a shell and a start-up file; returns the host as which they log in."""
    users: list[str] = []

    def add(shell: str, text: str = "", **changes: object) -> SshHost:
        path = shutil.which(shell)
        if path is None:
            pytest.skip(f"{shell} is not installed")
        user = f"tridock-{secrets.token_hex(4)}"
        home = open_folder / user
        home.mkdir()
        subprocess.run(
            ["useradd", "--no-create-home", "--home-dir", home, "--shell", path, "-p", "*", user], check=True
        )
        users.append(user)
        if text:
            where = home / START_UP[shell]
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text)
        subprocess.run(["chown", "-R", user, home], check=True)
        return sshd.host(user=user, **changes)

    yield add
    for user in users:
        subprocess.run(["pkill", "-KILL", "-u", user], check=False)
        subprocess.run(["userdel", user], check=False, capture_output=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_passes_a_command_on_unchanged(login: Login, shell: str) -> None:
    host = login(shell)
    arguments = [
        "a b",
        "",
        "$HOME",
        "`id`",
        "'",
        '"',
        "\\",
        "*",
        ";",
        "\n",
        "ä",
        "-n",
        "~",
        "!",
        "!!",
        "{a,b}",
        "=x",
        "%",
    ]
    done = host.run(Command.of("printf", "%s\\0", *arguments), timeout=STEP_S)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in arguments)
    assert (done.exit_code, done.stderr) == (0, b"")
    done = host.run(
        Command(("sh", "-c", 'cat; echo "$X"; pwd; echo oops >&2; exit 7'), {"X": "a 'b'"}, "/tmp", (), b"in\n")
    )
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"in\na 'b'\n/tmp\n", b"oops\n")


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell in START_UP])
def test_what_a_start_up_file_prints_is_no_part_of_an_answer(login: Login, shell: str) -> None:
    loud = "echo Welcome to the rack\n" + ("" if shell in ("csh", "tcsh") else "echo and mind the step >&2\n")
    host = login(shell, loud)
    done = host.run(Command.of("sh", "-c", "cat; echo two >&2", stdin=b"one\n"), timeout=STEP_S)
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"one\n", b"two\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_rsync_passes_through_every_login_shell(login: Login, shell: str, tmp_path: Path) -> None:
    host = login(shell, "echo Welcome; printf 'to the'\n" if shell in START_UP else "")
    for name in ("a 'b'", "#c"):
        (tmp_path / name).write_bytes(os.urandom(300_000))
    folder = host.run(Command.of("sh", "-c", 'mkdir "it\'s $1"; cd "it\'s $1"; pwd', "sh", "!$x")).stdout.decode()[:-1]
    printed = bytearray()
    command = Command.of("env", "-C", folder)
    options = ("--out-format=%i %n", f"{tmp_path}/", "host:.")
    done = host.rsync(command, *options, names=("a 'b'", "#c"), sink=printed.extend)
    assert (done.exit_code, done.stderr) == (0, b"")
    assert bytes(printed) == b"<f+++++++++ #c\n<f+++++++++ a 'b'\n"
    assert all((tmp_path / name).read_bytes() == Path(folder, name).read_bytes() for name in ("a 'b'", "#c"))


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        ("bash", "exec zsh\n"),
        ("bash", "read -r name\n"),
        ("zsh", "exec bash\n"),
        ("tcsh", "exec bash\n"),
        ("fish", "exec bash\n"),
    ],
)
@pytest.mark.parametrize("stdin", [None, b"one\n"])
def test_a_start_up_file_that_takes_the_commands_place_is_named(
    login: Login, monkeypatch: pytest.MonkeyPatch, shell: str, text: str, stdin: bytes | None
) -> None:
    command = Command.of("cat", stdin=stdin)
    if "read" in text and stdin is None:  # its end is all that it reads
        assert login(shell, text).run(command, timeout=STEP_S).exit_code == 0
        return
    monkeypatch.setattr("tridock.remote.ssh._SHELL_S", 1.0)
    host = login(shell, text, connect_timeout=4.0)
    said = message(lambda: host.run(command, timeout=STEP_S))
    assert said.startswith("node-1: its login shell ends or waits before it runs a command; got ")
    assert f"~/{START_UP[shell]}" in said


def test_a_start_up_file_that_ends_the_shell(login: Login) -> None:
    """Nobody is left who could say which shell it was."""
    said = message(lambda: login("bash", "exit 3\n").run(Command.of("true")))
    assert said.startswith(
        "node-1: its login shell ends or waits before it runs a command; got no output; look at what its start-up file"
    )
    assert "~/.bashrc, ~/.zshenv, " in said


def test_an_account_that_runs_no_commands(login: Login) -> None:
    said = message(lambda: login("nologin").run(Command.of("true")))
    assert said.startswith("node-1: its login shell ends or waits before it runs a command; got ")
    assert "not available" in said


def test_a_line_has_nothing_that_a_shell_reads_in_its_own_way() -> None:
    line = script_line("printf '%s\n' \"$HOME\" !! `id` ä")
    assert not set("\n'!`") & set(line)
    assert line.isascii()


def test_a_command_that_is_too_long_for_one_line(sshd: Sshd) -> None:
    with pytest.raises(ValueError, match="it has to go through standard input"):
        sshd.host().run(Command.of("true", "x" * 200_000))


def test_the_home_is_the_users_own(login: Login) -> None:
    host = login("fish")
    host.put_tree({"file": b"x"}, "~")
    assert host.run(Command.of("sh", "-c", "cat ~/file")).stdout == b"x"
