"""The ``deepspeed`` command line and its environment file, quoted so that the ranks get every argument unchanged."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tridock.command import Command
from tridock.engines import RankProgram

_EXPANDED = re.compile(r"([\\$`])")
_STEP = re.compile(rb"(\S+: )?\[[-\d]+ [:,\d]+\] \[INFO\] \[(runner|multinode_runner|launch)\.py:\d+:")
"""Of DeepSpeed's logger, in its launcher; pdsh puts the node before it."""
_DOUBLE_QUOTED_SPECIALS = re.compile(r'([\\"$`])')


def deepspeed_command(
    program: RankProgram,
    slots: Mapping[str, Sequence[int]],
    hostfile: str,
    master_addr: str,
    master_port: int,
) -> Command:
    """The head's command. One node needs no ssh.

    ``slots`` maps each node to the slot numbers in use; ``hostfile`` is the path of the run's own hostfile.
    ``--master_addr`` is always given: DeepSpeed's own guess is the first word of ``hostname -I``.
    """
    options = deepspeed_options(slots, hostfile, master_addr, master_port)
    arguments = program.arguments if len(slots) == 1 else tuple(map(for_pdsh, program.arguments))
    return Command(("deepspeed", *options, "--no_local_rank", "--module", program.module, *arguments))


def deepspeed_options(
    slots: Mapping[str, Sequence[int]], hostfile: str, master_addr: str, master_port: int
) -> list[str]:
    """What the cluster decides of the options of ``deepspeed``."""
    argv = ["--hostfile", hostfile]
    if any(list(numbers) != list(range(len(numbers))) for numbers in slots.values()):
        argv += ["--include", "@".join(f"{node}:{','.join(map(str, numbers))}" for node, numbers in slots.items())]
    argv += ["--master_addr", master_addr, "--master_port", str(master_port)]
    if len(slots) == 1:
        return [*argv, "--no_ssh", "--node_rank", "0"]
    # DeepSpeed's own check tries the first node only and hides ssh's message.
    return [*argv, "--launcher", "pdsh", "--no_ssh_check"]


def for_pdsh(argument: str) -> str:
    """One argument of the ranks' command line, quoted for pdsh.

    DeepSpeed hands it to pdsh, which replaces ``%h`` and its like, and ssh gives it to a shell. An argument with a
    space is in double quotes by then, with its own double quotes escaped; any other is not quoted.
    """
    argument = argument.replace("%", "%%")
    return _EXPANDED.sub(_escaped, argument) if " " in argument else shlex.quote(argument)


def without_steps(output: Iterable[bytes]) -> Iterator[bytes]:
    """The output of a run without the launcher's own steps, of which one has the whole environment: whole lines."""
    rest = b""
    for part in output:
        *lines, rest = (rest + part).split(b"\n")
        if shown := b"".join(line + b"\n" for line in lines if not _STEP.match(line)):
            yield shown
    if rest:
        yield rest


def environment_file(env: Mapping[str, str]) -> str:
    """DeepSpeed's environment file (``DS_ENV_FILE``): ``NAME=value`` lines, and nothing else.

    DeepSpeed strips each value, gives it to the remote shell in double quotes, and stops at a blank or comment line.
    What a shell expands in double quotes and what pdsh replaces is escaped here.
    """
    escaped = {name: _DOUBLE_QUOTED_SPECIALS.sub(_escaped, value).replace("%", "%%") for name, value in env.items()}
    return "".join(f"{name}={value}\n" for name, value in escaped.items())


def _escaped(match: re.Match[str]) -> str:
    return "\\" + match.group(1)
