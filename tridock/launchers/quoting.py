"""Text on its way through DeepSpeed, pdsh and ssh's remote shell, so that the ranks get it unchanged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

_EXPANDED = re.compile(r"([\\$`])")
_DOUBLE_QUOTED_SPECIALS = re.compile(r'([\\"$`])')


def for_pdsh(argument: str) -> str:
    """One argument of the ranks' command line, quoted for pdsh.

    DeepSpeed hands it to pdsh, which replaces ``%h`` and its like, and ssh gives it to a shell. An argument with a
    space is in double quotes by then, with its own double quotes escaped; any other is not quoted.
    """
    argument = argument.replace("%", "%%")
    return _EXPANDED.sub(_escaped, argument) if " " in argument else shlex.quote(argument)


def environment_file(env: Mapping[str, str]) -> str:
    """DeepSpeed's environment file (``DS_ENV_FILE``): ``NAME=value`` lines, and nothing else.

    DeepSpeed strips each value, gives it to the remote shell in double quotes, and stops at a blank or comment line.
    What a shell expands in double quotes and what pdsh replaces is escaped here.
    """
    escaped = {name: _DOUBLE_QUOTED_SPECIALS.sub(_escaped, value).replace("%", "%%") for name, value in env.items()}
    return "".join(f"{name}={value}\n" for name, value in escaped.items())


def _escaped(match: re.Match[str]) -> str:
    return "\\" + match.group(1)
