"""DeepSpeed's environment file, read by DeepSpeed's own code and a real shell."""

import argparse
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.engines import RankProgram
from tridock.launchers.deepspeed import deepspeed_command, environment_file

PROGRAM = RankProgram("tridock.train", ("--run-folder", "/workspace/runs/x"))
# DeepSpeed strips a value's ends: what begins or ends in white space cannot pass.
VALUES = st.text(st.characters(exclude_characters="\x00\n\r", exclude_categories=["Cs", "Cc"])).map(str.strip)


def past_pdsh(text: str) -> str:
    """What pdsh 2.34 makes of a command's text before it gives it to ssh."""
    return re.sub("%([%hnu])", lambda found: "%" if found[1] == "%" else "host", text)


@given(VALUES | st.sampled_from(("%h", "100%", "%%n", "$(id)", "`id`")))
def test_a_value_arrives_in_the_remote_shell_as_it_was(value: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.multinode_runner")

    class Exports(runner.PDSHRunner):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.exports: dict[str, str] = {}

    exports = Exports()
    for line in environment_file({"V": value}).splitlines(keepends=True):
        exports.add_export(*line.split("=", maxsplit=1))
    shell = f"export V={past_pdsh(exports.exports['V'])}; printenv V"
    assert subprocess.run(["bash", "-c", shell], capture_output=True, check=True).stdout.decode() == value + "\n"


def test_no_blank_or_comment_line_which_deepspeed_cannot_read() -> None:
    assert environment_file({"A": "1", "B": ""}) == "A=1\nB=\n"
    assert environment_file({}) == ""


def test_two_nodes_go_over_pdsh() -> None:
    command = deepspeed_command(PROGRAM, {"a": [0, 1], "b": [0, 1]}, "/r/hostfile", "10.0.0.1", 29500)
    assert command.render() == (
        "deepspeed --hostfile /r/hostfile --master_addr 10.0.0.1 --master_port 29500 --launcher pdsh --no_ssh_check "
        "--no_local_rank --module tridock.train --run-folder /workspace/runs/x"
    )


def test_single_slots_are_named_in_deepspeeds_own_grammar() -> None:
    argv = deepspeed_command(PROGRAM, {"a": [4, 5], "b": [0, 1]}, "/r/hostfile", "a", 1).argv
    assert argv[argv.index("--include") + 1] == "a:4,5@b:0,1"


def test_one_node_needs_no_ssh() -> None:
    argv = deepspeed_command(PROGRAM, {"a": [0, 1]}, "/r/hostfile", "a", 1).argv
    assert argv[7:10] == ("--no_ssh", "--node_rank", "0")
    assert "pdsh" not in argv


def test_a_node_that_starts_its_own_ranks_needs_no_ssh() -> None:
    argv = deepspeed_command(PROGRAM, {"a": [0, 1], "b": [0, 1]}, "/r/hostfile", "10.0.0.1", 29500, 1).argv
    assert argv[3:10] == ("--master_addr", "10.0.0.1", "--master_port", "29500", "--no_ssh", "--node_rank", "1")
    assert "pdsh" not in argv


ANYTHING = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
HOSTILE = (
    "$(touch pwned)",
    "`id`",
    "a;b",
    "x y $(id) \\",
    '"',
    '\\"',
    "a b\"'",
    "%h%n%%",
    "~",
    "*",
    "",
    "-",
    "\n",
    "a\nb c",
    "&",
    "|",
)


@given(st.lists(ANYTHING | st.sampled_from(HOSTILE), min_size=1, max_size=6))
def test_words_of_the_ranks_arrive_on_the_other_nodes_as_they_are(arguments: list[str]) -> None:
    """Through DeepSpeed's own code and a real shell."""
    runner = pytest.importorskip("deepspeed.launcher.multinode_runner")

    class Parsed(runner.PDSHRunner):  # type: ignore[misc, name-defined]
        def __init__(self, given: list[str]) -> None:
            self.args = argparse.Namespace(user_args=given)

    command = deepspeed_command(RankProgram("m", tuple(arguments)), {"a": [0], "b": [0]}, "/r/hostfile", "a", 1)
    given = list(command.argv[command.argv.index("m") + 1 :])
    line = " ".join(Parsed(given).parse_user_args())
    done = subprocess.run(["/bin/sh", "-c", f"printf '%s\\0' {past_pdsh(line)}"], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == arguments


def test_usual_words_stay_readable() -> None:
    program = RankProgram("m", ("--data-path", "/w/data/x_text", "--split", "80,10,10", "--lr", "1e-05"))
    many = deepspeed_command(program, {"a": [0], "b": [0]}, "/r/hostfile", "a", 1)
    assert many.argv[-6:] == program.arguments
