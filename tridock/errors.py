"""User-facing errors: a small class hierarchy with one exit code per branch.

Every message reads ``<where>: <what is wrong>; got <value>; <what to do>``. An error carries all problems found, so
that the user can fix them in one go.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

EXIT_INTERRUPTED: Final = 130


def exit_code_of(program: Callable[[], object]) -> int:
    """Runs a program. A :class:`TridockError` is printed to standard error; its exit code is returned."""
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


OUT_OF_INODES: Final = "no inodes left"
"""Why no file can be made on a disk with space."""
FREE_INODES: Final = "remove small files on that disk (du --inodes shows where they are)"


def reason_of(error: BaseException) -> str:
    """Returns the system's message of an OSError, or the error's own text; its ENOSPC may stand for inodes, too."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is not None:
        with suppress(OSError):
            found = os.statvfs(os.path.dirname(os.fspath(error.filename)) or ".")  # noqa: PTH120 - as given
            if found.f_favail == 0 < found.f_files:  # a file system that counts none says 0 of 0
                return OUT_OF_INODES
    return (isinstance(error, OSError) and error.strerror) or str(error)


_UNPRINTABLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST: Final = 1000
_MOST_SHOWN: Final = 50


def printable(text: str) -> str:
    """Escapes what a terminal would interpret (control and bidirectional characters) or cannot show (bytes of a file
    name that are not UTF-8). For a user's value or another program's output."""
    return _UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # Python's stand-in for a byte
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def cut(text: str, most: int) -> str:
    """Cuts the text to ``most`` characters and appends its full length; returns a shorter text unchanged."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: where it is, what is wrong, the value found, and what to do.

    The message omits an empty ``got`` (a host that did not answer has no value). It also omits ``nearest``, the closest
    legal values of the field, and ``cause``, the :class:`tridock.contracts.events.Cause` that a run failing with this
    problem records.
    """

    where: str
    what: str
    got: str
    todo: str
    nearest: tuple[int | str, ...] = ()
    cause: str = ""

    @property
    def message(self) -> dict[str, str]:
        """Returns the message's fields, from which another process rebuilds the problem with :meth:`of`."""
        return {"where": self.where, "what": self.what, "got": self.got, "todo": self.todo}

    @property
    def document(self) -> dict[str, Any]:
        """Returns what ``--json`` prints."""
        return {"field": printable(self.where), "message": str(self), "nearest": list(self.nearest)}

    @classmethod
    def of(cls, message: Mapping[str, str]) -> Problem:
        """Rebuilds a problem that another process reported."""
        return cls(message["where"], message["what"], message["got"], message["todo"])

    @classmethod
    def of_error(cls, where: object, what: str, error: BaseException, todo: str) -> Problem:
        """Returns the problem of an error of the system or a library, whose reason is the value got."""
        got = reason_of(error)
        return cls(str(where), what, got, FREE_INODES if got == OUT_OF_INODES else todo)

    def __str__(self) -> str:
        where, what, got, todo = (cut(part, _LONGEST) for part in (self.where, self.what, self.got, self.todo))
        return printable(f"{where}: {what}; {f'got {got}; ' if got else ''}{todo}")


class TridockError(Exception):
    """Base of every error that a user can cause or fix. ``exit_code`` is the process's exit code."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problems: Problem | Iterable[Problem], unaffected: Sequence[str] = ()) -> None:
        """``unaffected``: hosts without a problem, which the message names last."""
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.unaffected = tuple(unaffected)
        fine = [f"{', '.join(self.unaffected)}: no problem here; fix the others"] if self.unaffected else []
        super().__init__("\n".join([*self._lines(), *fine]))

    @classmethod
    def raise_for(cls, problems: Iterable[Problem]) -> None:
        """Raises the error if there are problems."""
        if found := tuple(problems):
            raise cls(found)

    @classmethod
    @contextmanager
    def in_place_of(
        cls, errors: type[Exception] | tuple[type[Exception], ...], where: object, what: str, todo: str
    ) -> Iterator[None]:
        """Raises the error in place of the system's or a library's, whose reason is the value got."""
        try:
            yield
        except errors as error:
            raise cls(Problem.of_error(where, what, error, todo)) from None

    def _lines(self) -> Iterator[str]:
        """The problems' messages."""
        yield from map(str, self.problems)

    def __reduce__(self) -> tuple[type[TridockError], tuple[tuple[Problem, ...], tuple[str, ...]]]:
        """Pickles the problems, not their text, because worker processes pass errors to their parent."""
        return type(self), (self.problems, self.unaffected)


class RequestError(TridockError):
    """The request is invalid: YAML, hostfile, arguments or plan. The message lists the first 50 problems."""

    exit_code = 2

    def _lines(self) -> Iterator[str]:
        yield from map(str, self.problems[:_MOST_SHOWN])
        if (more := len(self.problems) - _MOST_SHOWN) > 0:
            yield f"and {count(more, 'more problem')}"


class ClusterError(TridockError):
    """The cluster cannot do this because of a host, ssh, Docker or the image."""

    exit_code = 3


class RunError(TridockError):
    """The run failed."""

    exit_code = 4
