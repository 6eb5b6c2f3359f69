"""The logs of this node's ranks: whole, or as they grow until the run has ended here."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.run_state import exit_code_of, is_supervised
from tridock.errors import Problem, RequestError
from tridock.node.agent.processes import find_processes

_POLL_S: Final = 0.2
_SEARCH_S: Final = 1.0
_START_S: Final = 120.0
"""For a run that was launched a moment ago to begin on this node."""


def show(folder: Path, ranks: Sequence[int], *, follow: bool, prefix: bool) -> int:
    """Prints them; with ``prefix`` each line says whose it is. Ranks follow one another, or mix as they speak."""
    tails = [_Tail(folder, rank, prefix) for rank in ranks]
    missing = [tail for tail in tails if not tail.path.is_file()]
    if missing and not follow:
        todo = "it may not have begun, or on another node: see fab status"
        raise RequestError(Problem(f"rank {tail.rank}", "has no log here", str(tail.path), todo) for tail in missing)
    end = _End(folder)
    while True:
        # Looked at before the logs: what was written before the end is read after it.
        ended = not follow or end.has_come(any(tail.path.is_file() for tail in tails))
        for tail in tails:
            tail.print_news(to_the_end=ended)
        sys.stdout.buffer.flush()
        if ended:
            return 0
        time.sleep(_POLL_S)


class _Tail:
    """One rank's log, and how far it has been printed."""

    def __init__(self, folder: Path, rank: int, prefix: bool) -> None:
        self.rank, self.path = rank, folder / run_folder.rank_log(rank)
        self._prefix = f"rank {rank}: ".encode() if prefix else b""
        self._offset = 0

    def print_news(self, *, to_the_end: bool) -> None:
        """Whole lines only, as those of others come between; at the end also what has no line's end."""
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                news = log.read()
        except FileNotFoundError:
            return
        if not to_the_end:
            news = news[: news.rfind(b"\n") + 1]
        self._offset += len(news)
        for line in news.splitlines(keepends=True) if self._prefix else [news]:
            sys.stdout.buffer.write(self._prefix + line)
        if to_the_end and self._prefix and news and not news.endswith(b"\n"):
            sys.stdout.buffer.write(b"\n")


class _End:
    """Whether the run is over on this node; other nodes than the head have no exit code where they share no files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, time.monotonic()
        self._looked, self._there = 0.0, True

    def has_come(self, begun: bool) -> bool:
        now = time.monotonic()
        if exit_code_of(self._folder) is not None:
            return True
        if now - self._looked >= _SEARCH_S:  # it reads all of /proc
            self._looked = now
            self._there = is_supervised(self._folder) or bool(find_processes(self._folder.name))
        return not self._there and (begun or now - self._made > _START_S)
