"""Processes that are forked, do one thing and answer with a text."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Child:
    """A process that was forked, and the files of its answer and its output."""

    pid: int
    answer: Path
    output: Path

    @classmethod
    def fork(cls, work: Callable[[], str], path: Path, keep_output: bool = False) -> Child:
        """``work`` runs in the child, and its text goes to ``path`` with a suffix, as does the output if it is kept."""
        child = cls(os.fork(), path.with_suffix(".json"), path.with_suffix(".log"))
        if child.pid == 0:
            os._exit(child._do(work, keep_output))
        return child

    def _do(self, work: Callable[[], str], keep_output: bool) -> int:
        try:
            if keep_output:
                log = os.open(self.output, os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
            self.answer.write_text(work())
            return 0
        except BaseException:  # nothing may pass through into the code that forked
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def answers(children: Sequence[Child]) -> list[str]:
    """Waits for all. Raises :class:`RuntimeError` with the output of the first that failed."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) for child in children]
    for child, code in zip(children, codes, strict=True):
        if code:
            text = child.output.read_text() if child.output.is_file() else "see above"
            raise RuntimeError(f"{child.output.stem}: exit code {code}\n{text}")
    return [child.answer.read_text() for child in children]


def only_answer(work: Callable[[], str]) -> str:
    """What ``work`` gives in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return answers([Child.fork(work, Path(folder, "child"))])[0]
