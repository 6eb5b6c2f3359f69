"""User-facing errors: one small tree, each branch with its exit code.

Every message reads ``<where>: <what is wrong>; got <value>; <what to do>``. An error carries
all the problems that were found, so that a user mends them in one go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it stands, what it is, the value found, and the remedy.

    ``got`` is left out of the message when it is empty (a host that did not answer has no value).
    ``nearest`` is not part of it: values of the field that would do, next to the one found, a text as YAML has it.
    """

    where: str
    what: str
    got: str
    todo: str
    nearest: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Problem | None:
        """Reads a message of this form that a node printed; None for any other text."""
        match = re.fullmatch(r"([^\n]+?): ([^\n]+?); (?:got ([^\n]+); )?([^;\n]+)", text.strip())
        return None if match is None else cls(match[1], match[2], match[3] or "", match[4])

    def __str__(self) -> str:
        got = f"got {self.got}; " if self.got else ""
        return f"{self.where}: {self.what}; {got}{self.todo}"


class TridockError(Exception):
    """Base of every error that a user can cause or mend. ``exit_code`` is the process's."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[TridockError], tuple[tuple[Problem, ...]]]:
        """Out of a worker process it comes with its problems, not with their text."""
        return type(self), (self.problems,)


class RequestError(TridockError):
    """The request is wrong: YAML, hostfile, arguments, an illegal plan."""

    exit_code = 2


class ClusterError(TridockError):
    """The cluster is not fit: a host, ssh, Docker, the image."""

    exit_code = 3


class RunError(TridockError):
    """The run failed."""

    exit_code = 4
