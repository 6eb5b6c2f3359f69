"""A kept shell runs the next commands as a shell of their own would."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tridock.command import Command
from tridock.remote.files import put_texts_command
from tridock.remote.kept import KEEP, KEPT, next_script

SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> list[str]:
    return ["busybox", "sh"] if request.param == "busybox" else [request.param]


def ran(shell: list[str], *scripts: bytes) -> tuple[int, list[bytes], bytes]:
    """Exit code, the output of each step, and stderr."""
    done = subprocess.run(
        [*shell, "-c", f"echo facts\n{KEEP}", "facts"], input=b"".join(scripts), capture_output=True, timeout=30
    )
    return done.returncode, re.split(KEPT.pattern.removesuffix(rb"\Z").replace(b"(", b"(?:"), done.stdout), done.stderr


def test_commands_follow_each_other(shell: list[str]) -> None:
    hard = ("it's", "", "a\nb", "$HOME", "\\n `x` *", " last", "é")
    first = next_script(Command.of("printf", "<%s>", *hard), last=False, has_input=False)
    inline = Command.of("sh", "-c", 'cd / && umask 077 && printf "%s|" "$@" && set -e', "name", *hard)
    second = next_script(inline, last=False, has_input=False)
    third = next_script(
        Command(("sh", "-c", 'echo "$x" in $PWD'), env={"x": "1"}, cwd="/usr"), last=True, has_input=True
    )
    code, (facts, one, two, three), errors = ran(shell, first, second, third)
    assert (code, errors, facts) == (0, b"", b"facts\n")
    assert one == "".join(f"<{word}>" for word in hard).encode()
    assert two == "".join(f"{word}|" for word in hard).encode()
    assert three == b"1 in /usr\n"


def test_what_follows_the_last_script_is_its_input(shell: list[str]) -> None:
    script = next_script(Command.of("cat"), last=True, has_input=True)
    assert ran(shell, script, b">more\nlast\n\0x") == (0, [b"facts\n", b">more\nlast\n\0x"], b"")


def test_a_command_that_is_not_the_last_leaves_the_input_of_the_next(shell: list[str], tmp_path: Path) -> None:
    files = {"key": b"it's\n$HOME\n", "known": b"a b\n" * 3000, "empty": b""}
    put = put_texts_command(files, str(tmp_path / "keys"))
    assert put.stdin is not None
    none = next_script(Command.of("cat"), last=False, has_input=False)
    first, last = (next_script(put, last=last, has_input=True) for last in (False, True))
    other = put_texts_command({"key": b"other"}, str(tmp_path / "keys"))
    assert other.stdin is not None
    second = next_script(other, last=True, has_input=True)
    assert ran(shell, none, first, put.stdin, second, other.stdin) == (0, [b"facts\n", b"", b"", b""], b"")
    found = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    assert found == {**files, "key": b"other"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}
    assert ((tmp_path / "keys").stat().st_mode & 0o777, len(list(tmp_path.iterdir()))) == (0o700, 1)
    code, outputs, errors = ran(shell, last, put.stdin[:-9])
    assert (code, outputs[1:]) == (1, [b""])
    assert errors == f"only part of the files for {tmp_path}/keys arrived\n".encode()
    assert {path.name for path in (tmp_path / "keys").iterdir()} == set(files)


@pytest.mark.parametrize("last", [True, False])
def test_a_command_that_fails_ends_the_shell(shell: list[str], last: bool) -> None:
    command = Command.of("sh", "-c", "echo so far; echo why >&2; exit 7")
    more = next_script(Command.of("echo", "more"), last=True, has_input=False)
    code, outputs, errors = ran(shell, next_script(command, last=last, has_input=False), more)
    assert (code, outputs, errors) == (7, [b"facts\n", b"so far\n"], b"why\n")


def test_without_another_command_the_shell_ends(shell: list[str]) -> None:
    assert ran(shell) == (0, [b"facts\n", b""], b"")
    assert ran(shell, b">echo cut off\nla") == (0, [b"facts\n", b""], b"")
    assert ran(shell, b">echo cut o") == (0, [b"facts\n", b""], b"")


def test_keys_are_no_arguments_of_a_process(shell: list[str], tmp_path: Path) -> None:
    """A shell without its own printf finds none, and fails."""
    put = put_texts_command({"key": b"secret"}, str(tmp_path / "keys"))
    spy = "printf() { command -v printf; unset -f printf; env printf %s x; }\n"
    done = subprocess.run([*shell, "-c", spy + put.argv[2], *put.argv[3:]], input=put.stdin, capture_output=True)
    assert done.returncode != 0
    assert not (tmp_path / "keys").exists()
    assert b"secret" not in " ".join(put.argv).encode()


def test_why_keys_cannot_be_written(tmp_path: Path) -> None:
    put = put_texts_command({"key": b"x"}, str(tmp_path / "keys"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tee").write_text("#!/bin/sh\ncat >/dev/full\n")
    (tmp_path / "bin" / "tee").chmod(0o755)
    failing = put.stdin and put.stdin.replace(b'>"$part/key"', b">/dev/full")
    argv = [*put.argv[:5], str(len(failing or b"")), put.argv[6]]
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    done = subprocess.run(argv, input=failing, capture_output=True, env={"PATH": path})
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    assert not (tmp_path / "keys").exists()
