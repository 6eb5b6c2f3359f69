"""The ``deepspeed`` command line: pdsh over SSH from the head, or one node's ranks without ssh."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from tridock.command import Command
from tridock.engines import RankProgram

_EXPANDED = re.compile(r"([\\$`])")
_DOUBLE_QUOTED_SPECIALS = re.compile(r'([\\"$`])')


def deepspeed_command(
    program: RankProgram,
    slots: Mapping[str, Sequence[int]],
    hostfile: str,
    master_addr: str,
    master_port: int,
    node_rank: int | None = None,
) -> Command:
    """What runs on the head; with ``node_rank``, what runs on that node to start its own ranks only.

    ``slots`` maps each node to the slot numbers in use; ``hostfile`` is the path of the run's own hostfile.
    With one node the ranks are this machine's: no ssh is needed, and DeepSpeed is told so.
    ``--master_addr`` is always given: DeepSpeed's own guess is the first word of ``hostname -I``.
    """
    words = ["deepspeed", "--hostfile", hostfile]
    if any(list(numbers) != list(range(len(numbers))) for numbers in slots.values()):
        words += ["--include", "@".join(f"{node}:{','.join(map(str, numbers))}" for node, numbers in slots.items())]
    words += ["--master_addr", master_addr, "--master_port", str(master_port)]
    if len(slots) == 1 or node_rank is not None:
        words += ["--no_ssh", "--node_rank", str(node_rank or 0)]
    else:
        # The check that DeepSpeed would make tries the first node only and hides ssh's words.
        words += ["--launcher", "pdsh", "--no_ssh_check"]
        return Command((*words, *_ranks(program.module, map(for_pdsh, program.arguments))))
    return Command((*words, *_ranks(program.module, program.arguments)))


def _ranks(module: str, arguments: Iterable[str]) -> tuple[str, ...]:
    return ("--no_local_rank", "--module", module, *arguments)


def for_pdsh(word: str) -> str:
    """A word of the ranks' command line, such that they get it as it is.

    DeepSpeed hands the words to pdsh, which replaces ``%h`` and its like, and ssh gives them to a shell. A word with a
    space comes between double quotes by then, with what double quotes it holds escaped; any other comes as it is.
    """
    word = word.replace("%", "%%")
    return _EXPANDED.sub(_escaped, word) if " " in word else shlex.quote(word)


def environment_file(env: Mapping[str, str]) -> str:
    """DeepSpeed's environment file (``DS_ENV_FILE``): ``NAME=value`` lines, and nothing else.

    DeepSpeed strips each value, puts it between double quotes and gives it to the remote shell, and stops at a
    blank or comment line; so what a shell expands between double quotes is escaped here, and what pdsh replaces.
    """
    escaped = {name: _DOUBLE_QUOTED_SPECIALS.sub(_escaped, value).replace("%", "%%") for name, value in env.items()}
    return "".join(f"{name}={value}\n" for name, value in escaped.items())


def _escaped(match: re.Match[str]) -> str:
    return "\\" + match.group(1)
