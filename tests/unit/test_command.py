"""Commands as data: rendering is exact, masking is complete."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.command import MASK, Command

ARGUMENTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)


@given(st.lists(ARGUMENTS, min_size=1, max_size=6))
def test_a_shell_reads_back_exactly_the_argv(arguments: list[str]) -> None:
    line = Command.of("printf", "%s\\0", *arguments).render()
    out = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert out.decode().split("\0")[:-1] == arguments


@given(ARGUMENTS)
def test_the_environment_arrives_through_inside(value: str) -> None:
    command = Command.of("printenv", "V", env={"V": value}).inside(Command.of("env"))
    out = subprocess.run(["bash", "-c", command.render()], capture_output=True, check=True).stdout
    assert out.decode() == value + "\n"


def test_inside_carries_the_folder_and_the_input() -> None:
    inner = Command(("ls", "-l"), env={"A": "1 2"}, cwd="/tmp", stdin=b"x")
    outer = inner.inside(Command.of("docker", "exec", "-i", "node"))
    assert outer.render() == "docker exec -i node env -C /tmp 'A=1 2' ls -l"
    assert outer.stdin == b"x"


def test_render_with_folder_and_environment() -> None:
    assert Command(("ls",), env={"A": "b c"}, cwd="/a b").render() == "cd '/a b' && A='b c' ls"


@given(st.from_regex(r"[QZ'\" $]{4,12}Q", fullmatch=True))
def test_str_never_shows_a_secret(secret: str) -> None:
    command = Command(
        ("login", secret, f"--url=http://u:{secret}@h"), env={"T": secret}, cwd=f"/x/{secret}", secrets=(secret,)
    )
    assert str(command) == f"cd '/x/{MASK}' && T='{MASK}' login '{MASK}' '--url=http://u:{MASK}@h'"
    assert "Q" in command.render()


def test_input_is_not_shown() -> None:
    assert "private" not in repr(Command.of("cat", stdin=b"private"))


def test_a_command_has_a_program() -> None:
    with pytest.raises(ValueError, match=r"^a command needs at least a program name$"):
        Command(())
