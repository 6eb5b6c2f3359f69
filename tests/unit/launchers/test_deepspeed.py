"""DeepSpeed's environment file, read by DeepSpeed's own code and a real shell."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.engines import RankProgram
from tridock.launchers.deepspeed import deepspeed_command, environment_file

PROGRAM = RankProgram("tridock.train", ("--run-folder", "/workspace/runs/x"))
# DeepSpeed strips a value's ends: what begins or ends in white space cannot pass.
VALUES = st.text(st.characters(exclude_characters="\x00\n\r", exclude_categories=["Cs", "Cc"])).map(str.strip)


@given(VALUES)
def test_a_value_arrives_in_the_remote_shell_as_it_was(value: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.multinode_runner")

    class Exports(runner.PDSHRunner):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.exports: dict[str, str] = {}

    exports = Exports()
    for line in environment_file({"V": value}).splitlines(keepends=True):
        exports.add_export(*line.split("=", maxsplit=1))
    shell = f"export V={exports.exports['V']}; printenv V"
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
