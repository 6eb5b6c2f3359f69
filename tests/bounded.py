"""A command of `tridock` in a process of its own, with limits: what it printed, how it ended, how long it computed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.patience import STEP_S
from tridock.cli import main

_MEMORY = 4 << 30
_LONGEST_LINE = 1500
_LONGEST_TEXT = 100_000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Ended:
    argv: tuple[str, ...]
    code: int
    """Its exit code; -N where signal N ended it."""
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object on standard output; Infinity and NaN are not JSON."""
        found = json.loads(self.out, parse_constant=_no_constant)
        assert isinstance(found, dict), self.out[:200]
        assert found["version"] == 1
        return found

    def check(self, *codes: int) -> Ended:
        """Fails where it broke a promise of docs/architecture.md, or ended with another code than those given."""
        shown = f"{[word[:300] for word in self.argv]} ended with {self.code}:\n{self.err[-2000:]}"
        assert "Traceback" not in self.err, shown
        assert self.code in (codes or (0, 2, 3, 4)), shown
        for text in (self.out, self.err):
            assert not (found := _CONTROL.search(text)), f"{found!r}: {shown}"
        assert max(map(len, self.err.splitlines()), default=0) <= _LONGEST_LINE, shown
        assert len(self.err) <= _LONGEST_TEXT, shown
        if "--json" in self.argv:
            assert self.code == 0 or self.document["problems"], shown
        elif self.code:
            assert self.err, shown
        return self


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


Program = Callable[[Sequence[str]], int]


def run_bounded(
    argv: Sequence[str], folder: Path, *, seconds: int = 20, stdin: bytes = b"", program: Program = main
) -> Ended:
    """Runs ``tridock argv``, or another program, in a fork of this process, whose imports it has.

    The kernel ends it after ``seconds`` of processor time.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        child = os.fork()
        if child == 0:
            _run(program, argv, folder, seconds, (given.fileno(), out.fileno(), err.fileno()))
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Ended(tuple(argv), os.waitstatus_to_exitcode(status), *texts)


def _run(program: Program, argv: Sequence[str], folder: Path, seconds: int, streams: tuple[int, int, int]) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)
        signal.alarm(STEP_S)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds + int(sum(os.times()[:2])), resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", errors=errors)  # noqa: SIM115, PTH123  until the process ends
            for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
        )
        os.chdir(folder)
        try:
            code = program(list(argv))
        except SystemExit as ended:  # argparse
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
