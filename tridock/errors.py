"""User-facing errors: one small tree, an exit code for each branch.

Every message reads ``<where>: <what is wrong>; got <value>; <what to do>``. An error carries
all problems found, so that the user fixes them at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

EXIT_INTERRUPTED: Final = 130


def exit_code_of(program: Callable[[], object]) -> int:
    """Runs a program; an error of the user's ends it with its message on standard error and its exit code."""
    try:
        program()
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def count(number: int, noun: str) -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST: Final = 1000
_MOST_SHOWN: Final = 50


def printable(text: str) -> str:
    """The text with escapes for what a terminal would obey (control characters, changes of direction) and for what
    it cannot show (bytes of a file's name that are not UTF-8). Of a user's value or another program's output."""
    return _UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # Python's stand-in for a byte
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def cut(text: str, most: int) -> str:
    """The first ``most`` characters, and how long the whole is; the whole where it is no longer."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where, what, the value got, and what to do.

    The message leaves out an empty ``got`` (a host that did not answer has no value).
    The message has neither ``nearest``, the closest legal values of the field, nor ``cause``, the
    :class:`tridock.contracts.events.Cause` that a run which fails of it records.
    """

    where: str
    what: str
    got: str
    todo: str
    nearest: tuple[int | str, ...] = ()
    cause: str = ""

    @property
    def message(self) -> dict[str, str]:
        """The fields of the message, for another process, which calls :meth:`of` with them."""
        return {"where": self.where, "what": self.what, "got": self.got, "todo": self.todo}

    @property
    def document(self) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        return {"field": printable(self.where), "message": str(self), "nearest": list(self.nearest)}

    @classmethod
    def of(cls, message: Mapping[str, str]) -> Problem:
        """The problem of another process."""
        return cls(message["where"], message["what"], message["got"], message["todo"])

    def __str__(self) -> str:
        where, what, got, todo = (cut(part, _LONGEST) for part in (self.where, self.what, self.got, self.todo))
        return printable(f"{where}: {what}; {f'got {got}; ' if got else ''}{todo}")


class TridockError(Exception):
    """Base of every error that a user can cause or fix. ``exit_code`` is that of the process."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problems: Problem | Iterable[Problem], unaffected: Sequence[str] = ()) -> None:
        """``unaffected``: the hosts without a problem; the message names them last."""
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.unaffected = tuple(unaffected)
        fine = [f"{', '.join(self.unaffected)}: no problem here; fix the others"] if self.unaffected else []
        super().__init__("\n".join([*self._lines(), *fine]))

    def _lines(self) -> Iterator[str]:
        """The problems' messages."""
        yield from map(str, self.problems)

    def __reduce__(self) -> tuple[type[TridockError], tuple[tuple[Problem, ...], tuple[str, ...]]]:
        """Pickles the problems, not their text: errors travel out of worker processes."""
        return type(self), (self.problems, self.unaffected)


class RequestError(TridockError):
    """The request is wrong: YAML, hostfile, arguments, an illegal plan. The message has the first 50 problems."""

    exit_code = 2

    def _lines(self) -> Iterator[str]:
        yield from map(str, self.problems[:_MOST_SHOWN])
        if (more := len(self.problems) - _MOST_SHOWN) > 0:
            yield f"and {count(more, 'more problem')}"


class ClusterError(TridockError):
    """The cluster cannot run this: a host, ssh, Docker, the image."""

    exit_code = 3


class RunError(TridockError):
    """The run failed."""

    exit_code = 4


EXTRAS: Final[Mapping[str, Sequence[str]]] = {
    "data": ("gigatoken", "numpy", "pyarrow", "sentencepiece", "simdjson", "tiktoken", "tokenizers", "zstandard"),
    "report": ("matplotlib",),
    "trackers": ("mlflow", "tensorboard", "wandb"),
    "notify": ("apprise",),
}
"""Modules that only some commands import, by the extra that installs them (``locks/data.in``, ``locks/report.in``)."""


@contextmanager
def extras_explained() -> Iterator[None]:
    """Turns the ImportError of a module that an extra installs into a :class:`ClusterError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        for extra, modules in EXTRAS.items():
            if module in modules:
                todo = f"pip install 'tridock[{extra}]', or make venv in a checkout"
                raise ClusterError(Problem(module, "is not installed", "", todo)) from None
        raise
