"""DeepSpeed's environment file and command line, through DeepSpeed's own code and a real shell."""

import argparse
import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.engines import RankProgram
from tridock.launchers.deepspeed import deepspeed_command, environment_file

runner = pytest.importorskip("deepspeed.launcher.multinode_runner")

# DeepSpeed strips a value's ends: what begins or ends in white space cannot pass.
VALUES = st.text(st.characters(exclude_characters="\x00\n\r", exclude_categories=["Cs", "Cc"])).map(str.strip)


def past_pdsh(text: str) -> str:
    """What pdsh 2.34 makes of a command's text before it gives it to ssh."""
    return re.sub("%([%hnu])", lambda found: "%" if found[1] == "%" else "host", text)


@given(VALUES | st.sampled_from(("%h", "100%", "%%n", "$(id)", "`id`")))
def test_a_value_arrives_in_the_remote_shell_as_it_was(value: str) -> None:
    class Exports(runner.PDSHRunner):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.exports: dict[str, str] = {}

    exports = Exports()
    for line in environment_file({"V": value}).splitlines(keepends=True):
        exports.add_export(*line.split("=", maxsplit=1))
    shell = f"export V={past_pdsh(exports.exports['V'])}; printenv V"
    assert subprocess.run(["bash", "-c", shell], capture_output=True, check=True).stdout.decode() == value + "\n"


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
def test_arguments_of_the_ranks_arrive_on_the_other_nodes_unchanged(arguments: list[str]) -> None:
    class Parsed(runner.PDSHRunner):  # type: ignore[misc, name-defined]
        def __init__(self, given: list[str]) -> None:
            self.args = argparse.Namespace(user_args=given)

    command = deepspeed_command(RankProgram("m", tuple(arguments)), {"a": [0], "b": [0]}, "/r/hostfile", "a", 1)
    given = list(command.argv[command.argv.index("m") + 1 :])
    line = " ".join(Parsed(given).parse_user_args())
    done = subprocess.run(["/bin/sh", "-c", f"printf '%s\\0' {past_pdsh(line)}"], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == arguments
