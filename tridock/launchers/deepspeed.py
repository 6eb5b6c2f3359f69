"""The ``deepspeed`` command line and its environment file, quoted so that the ranks receive each argument unchanged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tridock.command import Command
from tridock.contracts import run_folder

if TYPE_CHECKING:  # the planner, which `tridock run` does not import
    from tridock.engines import RankProgram

_EXPANDED = re.compile(r"([\\$`])")
_STEP = re.compile(rb"(\S+: )?\[[-\d]+ [:,\d]+\] \[INFO\] \[(runner|multinode_runner|launch)\.py:\d+:")
"""A line of the DeepSpeed launcher's logger, after pdsh's node prefix."""
_DOUBLE_QUOTED_SPECIALS = re.compile(r'([\\"$`])')


def deepspeed_command(
    program: RankProgram, slots: Mapping[str, Sequence[int]], hostfile: str, master_addr: str, master_port: int
) -> Command:
    """Returns the head's command. A single node needs no ssh.

    ``slots`` maps each node to its slot numbers in use; ``hostfile`` is the path of the run's own hostfile.
    ``--master_addr`` is always given: DeepSpeed's default is the first word of ``hostname -I``.
    """
    options = deepspeed_options(slots, hostfile, master_addr, master_port)
    arguments = program.arguments if len(slots) == 1 else tuple(map(for_pdsh, program.arguments))
    return Command(("deepspeed", *options, "--no_local_rank", "--module", program.module, *arguments))


def deepspeed_options(
    slots: Mapping[str, Sequence[int]], hostfile: str, master_addr: str, master_port: int
) -> list[str]:
    argv = ["--hostfile", hostfile]
    if any(list(numbers) != list(range(len(numbers))) for numbers in slots.values()):
        argv += ["--include", "@".join(f"{node}:{','.join(map(str, numbers))}" for node, numbers in slots.items())]
    argv += ["--master_addr", master_addr, "--master_port", str(master_port)]
    if len(slots) == 1:
        return [*argv, "--no_ssh", "--node_rank", "0"]
    # DeepSpeed's own check tries only the first node and hides ssh's message.
    return [*argv, "--launcher", "pdsh", "--no_ssh_check"]


def for_pdsh(argument: str) -> str:
    """Quotes one argument of the ranks' command line for pdsh.

    DeepSpeed passes it to pdsh, which replaces ``%h`` and similar, and ssh passes it to a shell. By then an argument
    with a space is in double quotes, with its own double quotes escaped; any other is unquoted.
    """
    argument = argument.replace("%", "%%")
    return _EXPANDED.sub(_escaped, argument) if " " in argument else shlex.quote(argument)


def without_steps(output: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the output of a run without the launcher's own log lines, one of which has the whole environment."""
    rest = b""
    for part in output:
        *lines, rest = (rest + part).split(b"\n")
        if shown := b"".join(line + b"\n" for line in lines if not _STEP.match(line)):
            yield shown
        if b"\r" in rest or len(rest) > run_folder.LONGEST_LINE:  # a progress bar overwrites its line
            yield rest
            rest = b""
    if rest:
        yield rest


def environment_file(env: Mapping[str, str]) -> str:
    """Returns DeepSpeed's environment file (``DS_ENV_FILE``): ``NAME=value`` lines only.

    DeepSpeed strips each value, passes it to the remote shell in double quotes, and stops at a blank or comment line.
    Characters that a shell expands in double quotes, or that pdsh replaces, are escaped here.
    """
    escaped = {name: _DOUBLE_QUOTED_SPECIALS.sub(_escaped, value).replace("%", "%%") for name, value in env.items()}
    return "".join(f"{name}={value}\n" for name, value in escaped.items())


def _escaped(match: re.Match[str]) -> str:
    return "\\" + match.group(1)
