"""A run's output on its way to the terminal, from a head that may vanish without a word."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from tridock.contracts import run_folder
from tridock.errors import ClusterError, Problem, TridockError
from tridock.remote import Stream

SILENCE_S: Final = 4 * run_folder.BEAT_S
_CLOSING_S: Final = 2.0


class Followed:
    """What ``tridock.node follow --beats`` prints, without its signs of life; ``exit_code`` is the run's.

    Raises :class:`ClusterError` where the head is not there any more, whichever way it went: paused, cut off, killed.
    """

    def __init__(self, stream: Stream, head: str, run_id: str) -> None:
        self.exit_code = -1
        self._stream, self._head, self._run_id = stream, head, run_id

    def __iter__(self) -> Iterator[bytes]:
        news: SimpleQueue[bytes | TridockError | None] = SimpleQueue()
        # Read aside: a connection that is dead can hold up its reader for longer than we want to wait.
        threading.Thread(target=self._read, args=(news,), daemon=True).start()
        ended = False
        try:
            while (part := self._next(news)) is not None:
                ended = ended or run_folder.END in part
                if text := part.replace(run_folder.BEAT, b"").replace(run_folder.END, b""):
                    yield text
        finally:
            closing = threading.Thread(target=self._stream.close, daemon=True)
            closing.start()
            closing.join(_CLOSING_S)
        if not ended:
            raise self._gone("its node ended", f"exit code {self._stream.exit_code}")
        self.exit_code = self._stream.exit_code

    def _read(self, news: SimpleQueue[bytes | TridockError | None]) -> None:
        try:
            for part in self._stream:
                news.put(part)
        except TridockError as error:
            news.put(error)
        finally:
            news.put(None)

    def _next(self, news: SimpleQueue[bytes | TridockError | None]) -> bytes | None:
        try:
            part = news.get(timeout=SILENCE_S)
        except Empty:
            raise self._gone(f"has said nothing for {SILENCE_S:.0f} s") from None
        if isinstance(part, TridockError):
            raise self._gone("the connection to it was lost", part.problems[0].got) from None
        return part

    def _gone(self, what: str, got: str = "") -> ClusterError:
        todo = "the nodes that have lost it end their ranks by themselves; see fab status once it is back"
        return ClusterError(Problem(self._head, f"{what} while {self._run_id} was followed", got, todo))

    def close(self) -> None:
        """Stops reading; the run goes on."""
        with suppress(TridockError):
            self._stream.close()
