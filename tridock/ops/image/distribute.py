"""Distributes an image: the operator's machine sends each piece once, and hosts pass it on to each other."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from queue import SimpleQueue

from tridock.errors import ClusterError
from tridock.ops.hosts.session import Session
from tridock.ops.image.archive import Archive, ImageParts, Piece
from tridock.ops.image.peers import KEYS, Peers, PieceServer
from tridock.ops.image.schedule import OPERATOR, Schedule, Transfer
from tridock.ops.image.transfer import Delivery, Inventory
from tridock.progress import Bar, Bars
from tridock.remote import Outcome, on_all, raise_failures

_MOST_INLINE, _MOST_INLINE_OF_ALL = 4_000_000, 48_000_000


def inline_bytes(hosts: int) -> int:
    """Returns the bytes of small layers that the operator's machine sends each host, as connecting hosts costs more."""
    return min(_MOST_INLINE, _MOST_INLINE_OF_ALL // max(1, hosts))


class Distribution:
    """The distribution of one image; :meth:`run` returns once each host has it or has failed."""

    def __init__(
        self,
        session: Session,
        deliveries: Mapping[str, Delivery],
        archives: Mapping[str, Archive],
        ids: Mapping[str, Iterable[str]],
        bars: Bars,
        note: Callable[[str], object],
        arrived: Callable[[str, Archive], object],
    ) -> None:
        """``ids``: by node, the image's ids, which the host records.

        ``arrived`` is called with each node that has the image.
        """
        self.session, self.deliveries, self.archives = session, deliveries, archives
        self.ids, self.bars, self.note, self.arrived = ids, bars, note, arrived
        self.incomplete: dict[str, str] = {}
        """The nodes whose hosts need the whole image, and why."""
        self.sent: Counter[str] = Counter()
        """Bytes sent, by source."""
        self._cap = session.cluster.settings.ssh.max_connections
        self._outcomes: dict[str, Outcome[None]] = {}
        self._events: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._pieces: dict[str, Piece] = {}
        self._sums: dict[str, str] = {}
        self._progress_bars: dict[str, Bar] = {}
        self._left: set[str] = set()
        self._piece_servers: Mapping[str, PieceServer] = {}
        self._schedule = Schedule({}, {}, (), 0)
        self._alone = False
        self._inventories: Mapping[str, Inventory] = {}

    def run(self, parts: ImageParts, present: Mapping[str, int], inventories: Mapping[str, Inventory]) -> None:
        """``present``: the number of leading layers on each host. Raises :class:`ClusterError` with all failures."""
        self._inventories = inventories

        def begin(node: str, _host: object) -> set[str]:
            delivery, archive = self.deliveries[node], self.archives[node]
            there = delivery.begin(archive, parts.unpacked_size(present[node]), inventories[node])
            if not archive.pieces:
                self._load_on(node)
            return there

        hosts = {node: self.session.hosts[node] for node in self.deliveries}
        started = on_all(hosts, begin, cap=self._cap)
        there = {node: outcome.value for node, outcome in started.items() if outcome.value is not None}
        self._outcomes = {node: Outcome(error=outcome.error) for node, outcome in started.items()}
        waiting = [node for node in there if self.archives[node].pieces]
        if waiting:
            try:
                self._send_pieces({node: there[node] for node in waiting})
            except BaseException:
                for node in waiting:
                    hosts[node].close()
                raise
            on_all({node: hosts[node] for node in waiting if self._outcomes[node].ok}, self._clear, cap=self._cap)
        raise_failures(self._outcomes)

    def from_hosts(self) -> int:
        """The bytes that hosts fetched from each other."""
        return self.sent.total() - self.sent[OPERATOR]

    def _clear(self, node: str, _host: object) -> None:
        self.deliveries[node].clear()

    def _send_pieces(self, there: Mapping[str, set[str]]) -> None:
        """Transfers the pieces; ``there``: those that each node already has."""
        pieces = {node: self.archives[node].pieces for node in there}
        missing = {node: [name for name in pieces[node] if name not in has] for node, has in there.items()}
        for node in there:
            self._pieces |= pieces[node]
            done = self.archives[node].size - sum(self._pieces[name].size for name in missing[node])
            self._progress_bars[node] = self.bars(f"send to {node}", self.archives[node].size, done=done)
        with ExitStack() as stack:
            if len(there) > 1 and any(missing.values()):
                folders = {node: self.deliveries[node].folder for node in there}
                peers = stack.enter_context(Peers(self.session, folders, self._gone))
                self._piece_servers = peers.piece_servers
                self._report_peers(peers.problems)
            self._schedule = Schedule(missing, there, self._piece_servers, self._cap)
            self._left = set(there)
            for node in there:
                self._progress(node, 0)
                if not missing[node]:
                    self._load(node)
            while self._left:
                for transfer in self._schedule.begin():
                    self._start(transfer.target, self._transfer(transfer))
                self._events.get()()
        self._tell_the_end()

    def _start(self, node: str, work: Callable[[], Callable[[], object]]) -> None:
        """Runs the work in a thread, then its returned callback in this thread."""

        def attempt() -> None:
            try:
                after = work()
            except Exception as error:
                failure = error
                after = lambda: self._lost(node, failure)  # noqa: E731
            self._events.put(after)

        threading.Thread(target=attempt, daemon=True).start()

    def _transfer(self, transfer: Transfer) -> Callable[[], Callable[[], object]]:
        node, piece = transfer.target, self._pieces[transfer.piece]
        delivery = self.deliveries[node]

        def from_here() -> Callable[[], object]:
            delivery.receive(piece, lambda count: self._progress(node, count))
            return lambda: self._ended(transfer, None)

        def from_a_host() -> Callable[[], object]:
            command = self._piece_servers[transfer.source].command(f"{delivery.folder}/{KEYS}")
            failure = delivery.fetch(piece, self._sum(piece), command)
            if failure is None:
                self._progress(node, piece.size)
            return lambda: self._ended(transfer, failure)

        return from_here if transfer.source == OPERATOR else from_a_host

    def _sum(self, piece: Piece) -> str:
        if piece.name not in self._sums:
            self._sums[piece.name] = piece.sha256()
        return self._sums[piece.name]

    def _progress(self, node: str, count: int) -> None:
        archive = self.archives[node]
        has = self._schedule.has.get(node, ())
        self._progress_bars[node](count, f"{archive.layers_in(has)}/{archive.layers} layers")

    def _ended(self, transfer: Transfer, failure: str | None) -> None:
        """Handles the end of a transfer with a working host."""
        node = transfer.target
        self._schedule.finish(transfer, failure)
        if failure is None:
            self.sent[transfer.source] += self._pieces[transfer.piece].size
        elif not self._alone and not any(map(self._schedule.sources_of, self._left)):
            self._alone = True
            self.note(f"the hosts cannot fetch from each other, each gets all layers from here: {failure}")
        if node in self._left and set(self.archives[node].pieces) <= self._schedule.has[node]:
            self._load(node)

    def _load_on(self, node: str) -> None:
        archive = self.archives[node]
        reason = self.deliveries[node].load(archive, self.ids[node], self._inventories[node])
        if reason:
            self.incomplete[node] = reason
        else:
            self.arrived(node, archive)

    def _load(self, node: str) -> None:
        delivery = self.deliveries[node]

        def load() -> Callable[[], object]:
            try:
                self._load_on(node)
            except ClusterError:
                delivery.clear()
                raise
            return lambda: self._left.discard(node)

        self._start(node, load)

    def _lost(self, node: str, error: Exception) -> None:
        if node in self._left:
            self._left.discard(node)
            self._schedule.lose(node)
            self._outcomes[node] = Outcome(error=error)

    def _gone(self, node: str) -> None:
        """Handles the end of a node's sshd."""
        self._events.put(lambda: self._schedule.drop_source(node))

    def _report_peers(self, problems: Mapping[str, str]) -> None:
        self._alone = not self._piece_servers
        if self._alone:
            reason = next(iter(problems.values()))
            self.note(f"the hosts cannot fetch from each other, each gets all layers from here: {reason}")
            return
        for reason in dict.fromkeys(problems.values()):
            names = ", ".join(node for node, own in problems.items() if own == reason)
            self.note(f"{names}: gives no layers to other hosts: {reason}")

    def _tell_the_end(self) -> None:
        if self._piece_servers and not self._alone:
            alone = [node for node in self._schedule.has if not self._schedule.sources_of(node)]
            for (_, target), reason in self._schedule.failures.items():
                if target in alone:
                    alone.remove(target)
                    self.note(f"{target}: got layers from here, it could not fetch them from other hosts: {reason}")
