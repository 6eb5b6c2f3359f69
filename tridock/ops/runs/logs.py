"""A run's output and its ranks' logs, read on the nodes; detects a head that disappears."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from tridock.contracts import run_folder
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.ops.hosts.session import NODE, Session
from tridock.ops.runs.registry import Run, parse_rank, plan_of
from tridock.remote import Stream

SILENCE_S: Final = 4 * run_folder.BEAT_S
_CLOSING_S: Final = 2.0


class LogStream:
    """The output of ``tridock.node follow --keepalive`` without keepalives; ``exit_code`` is the run's.

    Raises :class:`ClusterError` if the head disappears: paused, disconnected or killed.
    """

    def __init__(self, stream: Stream, head: str, run_id: str) -> None:
        self.exit_code = -1
        self._stream, self._head, self._run_id = stream, head, run_id

    def __iter__(self) -> Iterator[bytes]:
        chunks: SimpleQueue[bytes | TridockError | None] = SimpleQueue()
        # In a thread: a dead connection can block its reader beyond the timeout.
        threading.Thread(target=self._read, args=(chunks,), daemon=True).start()
        ended = False
        try:
            while (part := self._next(chunks)) is not None:
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

    def _read(self, chunks: SimpleQueue[bytes | TridockError | None]) -> None:
        try:
            for part in self._stream:
                chunks.put(part)
        except TridockError as error:
            chunks.put(error)
        finally:
            chunks.put(None)

    def _next(self, chunks: SimpleQueue[bytes | TridockError | None]) -> bytes | None:
        try:
            part = chunks.get(timeout=SILENCE_S)
        except Empty:
            raise self._gone(f"has said nothing for {SILENCE_S:.0f} s") from None
        if isinstance(part, TridockError):
            raise self._gone("the connection to it was lost", part.problems[0].got) from None
        return part

    def _gone(self, what: str, got: str = "") -> ClusterError:
        todo = "the nodes that have lost it end their ranks by themselves; see tridock status once it is back"
        return ClusterError(Problem(self._head, f"{what} while {self._run_id} was followed", got, todo))

    def close(self) -> None:
        """Stops reading; the run continues."""
        with suppress(TridockError):
            self._stream.close()


def follow(session: Session, run: Run) -> LogStream:
    """Streams the run's output; ``exit_code`` is set at the end."""
    command = session.inside(run.head, *NODE, "follow", "--keepalive", f"{run_folder.WORKSPACE}/runs/{run.run_id}")
    return LogStream(session.hosts[run.head].stream(command), run.head, run.run_id)


def choose_ranks(session: Session, run: Run, ranks: str, node: str) -> dict[str, list[int]]:
    """Returns the selected ranks by node: those of ``ranks`` (as ``0,3``), or all of a node's.

    Raises :class:`RequestError` for ranks and nodes that are not part of the run.
    """
    plan = plan_of(session, run)
    if not plan.get("rank_logs", True):
        what, todo = "the launcher of this run prints the output of all ranks together", "leave the option out"
        raise RequestError(Problem("--rank" if ranks else "--node", what, ranks or node, todo))
    places: dict[int, str] = {entry["rank"]: entry["node"] for entry in plan["ranks"]}
    if node and node not in places.values():
        nodes = ", ".join(dict.fromkeys(places.values()))
        raise RequestError(Problem("--node", "has no rank of this run", node, f"use one of: {nodes}"))
    wanted = [parse_rank(word) for word in ranks.split(",")] if ranks else list(places)
    if unknown := [rank for rank in wanted if rank not in places]:
        raise RequestError(
            Problem("--rank", "is not a rank of this run", str(rank), f"use 0 to {len(places) - 1}") for rank in unknown
        )
    chosen: dict[str, list[int]] = {}
    for rank in dict.fromkeys(wanted):
        if not node or places[rank] == node:
            chosen.setdefault(places[rank], []).append(rank)
    if not chosen:
        todo = f"it runs on {', '.join(sorted({places[rank] for rank in wanted}))}"
        raise RequestError(Problem("--rank", f"is not on node {node}", ranks, todo))
    return chosen


def read_rank_logs(session: Session, run: Run, chosen: Mapping[str, Sequence[int]], *, follow: bool) -> Iterator[bytes]:
    """Yields the ranks' logs node by node; with ``follow``, their output until the run ends on those nodes.

    With several ranks each line starts with its rank.
    """
    prefix = sum(map(len, chosen.values())) > 1
    streams = {node: _open(session, run, node, ranks, follow, prefix) for node, ranks in chosen.items()}
    if not follow or len(streams) == 1:
        for node, stream in streams.items():
            yield from stream
            _check(node, stream)
    else:
        yield from _mixed(streams)


def _open(session: Session, run: Run, node: str, ranks: Sequence[int], follow: bool, prefix: bool) -> Stream:
    flags = (*(("--follow",) if follow else ()), *(("--prefix",) if prefix else ()))
    argv = (*NODE, "rank-logs", run.run_id, *map(str, ranks), *flags)
    return session.hosts[node].stream(session.inside(node, *argv))


def _check(node: str, stream: Stream) -> None:
    if stream.exit_code:
        # The problem has been printed: errors are part of the output.
        what = "its ranks' logs could not be read to the end"
        todo = "see the lines above, and tridock status"
        raise ClusterError(Problem(node, what, f"exit code {stream.exit_code}", todo))


def _mixed(streams: Mapping[str, Stream]) -> Iterator[bytes]:
    """Yields whole lines as they arrive, so that lines of different nodes never mix."""
    chunks: SimpleQueue[tuple[str, bytes | TridockError | None]] = SimpleQueue()

    def pump(node: str, stream: Stream) -> None:
        rest = b""
        try:
            for part in stream:
                *lines, rest = (rest + part).split(b"\n")
                chunks.put((node, b"".join(line + b"\n" for line in lines)))
            chunks.put((node, rest))
            _check(node, stream)
            chunks.put((node, None))
        except TridockError as error:
            chunks.put((node, error))

    for node, stream in streams.items():
        threading.Thread(target=pump, args=(node, stream), daemon=True).start()
    failures: list[TridockError] = []
    unfinished = set(streams)
    try:
        while unfinished:
            node, part = chunks.get()
            if isinstance(part, bytes):
                yield part
                continue
            unfinished.discard(node)
            if part is not None:  # the other nodes may still send output
                failures.append(part)
    finally:
        for stream in streams.values():
            with suppress(TridockError):
                stream.close()
    if failures:
        raise ClusterError(problem for failure in failures for problem in failure.problems)
