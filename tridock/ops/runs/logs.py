"""A run's output and its ranks' logs, read on the nodes; detects a head that disappears."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Final

from tridock.contracts import run_folder
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.ops.hosts.client import NODE, NodeClient
from tridock.ops.runs.cluster_runs import Run, parse_rank, plan_of
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
        ended, rest = False, b""
        try:
            while (part := self._next()) is not None:
                *texts, last = (rest + part).split(b"\0\0")
                rest = last[-1:] if last.endswith(b"\0") else b""
                texts.append(last.removesuffix(b"\0"))
                ended = ended or any(run_folder.END in text for text in texts)
                if text := b"\0".join(it.replace(run_folder.BEAT, b"").replace(run_folder.END, b"") for it in texts):
                    yield text
        finally:
            closing = threading.Thread(target=self._stream.close, daemon=True)
            closing.start()
            closing.join(_CLOSING_S)
        if not ended:
            raise self._gone("its node ended", f"exit code {self._stream.exit_code}")
        self.exit_code = self._stream.exit_code

    def _next(self) -> bytes | None:
        try:
            return self._stream.part(SILENCE_S)
        except Empty:
            raise self._gone(f"has said nothing for {SILENCE_S:.0f} s") from None
        except TridockError as error:
            raise self._gone("the connection to it was lost", error.problems[0].got) from None

    def _gone(self, what: str, got: str = "") -> ClusterError:
        todo = "the nodes that have lost it end their ranks by themselves; see tridock status once it is back"
        return ClusterError(Problem(self._head, f"{what} while {self._run_id} was followed", got, todo))

    def close(self) -> None:
        """Stops reading; the run continues."""
        with suppress(TridockError):
            self._stream.close()


def follow(client: NodeClient, run: Run) -> LogStream:
    """Streams the run's output; ``exit_code`` is set at the end."""
    command = client.inside(run.head, *NODE, "follow", "--keepalive", f"{run_folder.WORKSPACE}/runs/{run.run_id}")
    return LogStream(client.hosts[run.head].stream(command), run.head, run.run_id)


def choose_ranks(client: NodeClient, run: Run, ranks: str, node: str) -> dict[str, list[int]]:
    """Returns the selected ranks by node: those of ``ranks`` (as ``0,3``), or all of a node's.

    Raises :class:`RequestError` for ranks and nodes that are not part of the run.
    """
    plan = plan_of(client, run)
    if not plan.get("rank_logs", True):
        what, todo = "the launcher of this run prints the output of all ranks together", "leave the option out"
        raise RequestError(Problem("--rank" if ranks else "--node", what, ranks or node, todo))
    ranked = (entry for entry in plan.get("ranks", ()) if isinstance(entry.get("rank"), int))
    places: dict[int, str] = {entry["rank"]: entry["node"] for entry in ranked}
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
    if others := ", ".join(chosen.keys() - client.hosts.keys()):
        todo = f"take the hostfile that the run was started with, or see {run.head}: {run_folder.PLAN}"
        raise RequestError(Problem("--rank", "is on a node that the hostfile does not have", others, todo))
    return chosen


def read_rank_logs(
    client: NodeClient, run: Run, chosen: Mapping[str, Sequence[int]], *, follow: bool
) -> Iterator[bytes]:
    """Yields the ranks' logs node by node; with ``follow``, their output until the run ends on those nodes.

    With several ranks each line starts with its rank.
    """
    prefix = sum(map(len, chosen.values())) > 1
    streams = {node: _open(client, run, node, ranks, follow, prefix) for node, ranks in chosen.items()}
    if not follow or len(streams) == 1:
        for node, stream in streams.items():
            yield from stream
            _check(node, stream)
    else:
        yield from _mixed(streams)


def _open(client: NodeClient, run: Run, node: str, ranks: Sequence[int], follow: bool, prefix: bool) -> Stream:
    flags = (*(("--follow",) if follow else ()), *(("--prefix",) if prefix else ()))
    argv = (*NODE, "rank-logs", run.run_id, *map(str, ranks), *flags)
    return client.hosts[node].stream(client.inside(node, *argv))


def _check(node: str, stream: Stream) -> None:
    if stream.exit_code:
        # The problem has been printed: errors are part of the output.
        what = "its ranks' logs could not be read to the end"
        todo = "see the lines above, and tridock status"
        raise ClusterError(Problem(node, what, f"exit code {stream.exit_code}", todo))


def _mixed(streams: Mapping[str, Stream]) -> Iterator[bytes]:
    """Yields whole lines as they arrive, so that lines of different nodes never mix."""
    chunks: Queue[tuple[str, bytes | TridockError | None]] = Queue(len(streams))

    def pump(node: str, stream: Stream) -> None:
        rest = b""
        try:
            for part in stream:
                lines, end, rest = (rest + part).rpartition(b"\n")
                if len(rest) > run_folder.LONGEST_LINE:  # nothing has room for an endless line
                    lines, rest = lines + end + rest, b""
                chunks.put((node, lines + end))
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
