"""Schedules the transfers of an image's pieces: the operator's machine sends each once, hosts the rest. Pure.

Nothing is planned ahead: when a transfer ends, machines with a free slot start others. A slow or lost host thus delays
only the hosts that are fetching from it at that moment.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

OPERATOR: Final = ""
"""The operator's machine as a source; no host has this name."""
SLOTS: Final = 2
"""Concurrent transfers per machine and direction: while one connects, the other uses the link."""
_STRIKES: Final = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece on its way from ``source`` to ``target``."""

    source: str
    target: str
    piece: str


class Schedule:
    """The pieces that each host has, lacks and is receiving."""

    def __init__(
        self,
        missing: Mapping[str, Iterable[str]],
        present: Mapping[str, Iterable[str]],
        sources: Iterable[str],
        most_from_here: int,
    ) -> None:
        """``missing`` and ``present`` are pieces by host; an interrupted command leaves some. ``sources`` serve pieces.

        ``most_from_here`` limits the operator's concurrent transfers if hosts do not help each other.
        """
        self.missing = {host: set(pieces) for host, pieces in missing.items()}
        self.has = {host: set(present.get(host, ())) for host in missing}
        self.running: set[Transfer] = set()
        self.failures: dict[tuple[str, str], str] = {}
        """By source and target, the reason why the target cannot fetch from the source."""
        pieces = dict.fromkeys(chain.from_iterable(missing.values()))
        self._order = {piece: place for place, piece in enumerate(pieces)}
        self._sources = set(sources)
        self._cut_off: set[str] = set()
        self._strikes: Counter[tuple[str, str]] = Counter()
        self._most_from_here = most_from_here

    @property
    def done(self) -> bool:
        """Returns whether every host has every piece."""
        return not self.running and not any(self.missing.values())

    def sources_of(self, target: str) -> list[str]:
        """Returns the hosts that a host may fetch from."""
        if target in self._cut_off:
            return []
        return [host for host in self._sources if host != target and (host, target) not in self.failures]

    def begin(self) -> list[Transfer]:
        """Returns the transfers to start now, which then count as running."""
        started: list[Transfer] = []
        uploads = Counter(transfer.source for transfer in self.running)
        downloads = Counter(transfer.target for transfer in self.running)
        copies = Counter(piece for host in self._sources for piece in self.has.get(host, ()))
        copies.update(transfer.piece for transfer in self.running if transfer.target in self._sources)
        alone = sum(not self.sources_of(host) for host, pieces in self.missing.items() if pieces)
        from_here = max(SLOTS, min(SLOTS + alone, self._most_from_here))
        while True:
            before = len(started)
            free = [host for host, pieces in self.missing.items() if pieces and downloads[host] < SLOTS]
            for target in sorted(free, key=lambda host: (downloads[host], len(self.has[host]))):
                transfer = None
                if uploads[OPERATOR] < from_here:
                    transfer = self._from_here(target, copies)
                transfer = transfer or self._from_a_host(target, uploads, copies)
                if transfer is not None:
                    started.append(transfer)
                    self.running.add(transfer)
                    self.missing[target].remove(transfer.piece)
                    uploads[transfer.source] += 1
                    downloads[target] += 1
                    copies[transfer.piece] += target in self._sources
            if len(started) == before:
                return started

    def _from_here(self, target: str, copies: Counter[str]) -> Transfer | None:
        """Returns the first piece that the target cannot get from another host."""
        sources = self.sources_of(target)
        if len(sources) == len(self._sources - {target}):
            pieces = {piece for piece in self.missing[target] if not copies[piece]}
        else:
            there = set().union(*(self.has[host] for host in sources))
            there |= {transfer.piece for transfer in self.running if transfer.target in sources}
            pieces = self.missing[target] - there
        if target not in self._sources:  # it passes nothing on: a host that serves pieces gets it first
            pieces = pieces.difference(*(self.missing[host] for host in sources))
        return Transfer(OPERATOR, target, min(pieces, key=self._order.__getitem__)) if pieces else None

    def _from_a_host(self, target: str, uploads: Counter[str], copies: Counter[str]) -> Transfer | None:
        """Returns the piece that the fewest hosts have, from the host with the fewest transfers."""
        missing = self.missing[target]
        found = (
            (copies[piece], uploads[source], self._order[piece], source, piece)
            for source in self.sources_of(target)
            if uploads[source] < SLOTS
            for piece in self.has[source] & missing
        )
        best = min(found, default=None)
        return Transfer(best[3], target, best[4]) if best else None

    def finish(self, transfer: Transfer, failure: str | None = None) -> None:
        """Records the end of a transfer; ``failure`` is why a host could not fetch from another."""
        if transfer not in self.running:
            return
        self.running.remove(transfer)
        ends = ("from", transfer.source), ("to", transfer.target)
        if failure is None:
            self.has[transfer.target].add(transfer.piece)
            for end in ends:
                self._strikes[end] = 0
            return
        self.missing[transfer.target].add(transfer.piece)
        self.failures[transfer.source, transfer.target] = failure
        self._strikes.update(ends)
        if self._strikes[ends[0]] >= _STRIKES:
            self.drop_source(transfer.source)
        if self._strikes[ends[1]] >= _STRIKES:
            self._cut_off.add(transfer.target)

    def drop_source(self, host: str) -> None:
        """Stops fetching from the host, which still receives what it lacks."""
        self._sources.discard(host)

    def lose(self, host: str) -> None:
        """Removes a lost host."""
        self.drop_source(host)
        self.missing.pop(host, None)
        self.has.pop(host, None)
        self.running -= {transfer for transfer in self.running if transfer.target == host}
