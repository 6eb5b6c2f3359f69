"""Simulates transfers between machines with equal links, from the end of one transfer to the end of the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tridock.ops.image.schedule import Schedule, Transfer


@dataclass
class Run:
    """What happened: seconds in all, pieces sent by each machine, and every transfer with its begin and end."""

    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    transfers: list[tuple[float, float, Transfer]] = field(default_factory=list)


def simulate(
    schedule: Schedule,
    *,
    latency: float = 0.0,
    broken: Callable[[Transfer, float], bool] = lambda _transfer, _now: False,
    lost: tuple[str, float] | None = None,
) -> Run:
    """Every machine sends a piece a second, and receives one; transfers of one machine share its link.

    ``latency`` is the time before a transfer's first byte, ``broken`` those that fail then. ``lost`` is a host and
    when it is lost.
    """
    run, now = Run(), 0.0
    left: dict[Transfer, float] = {}
    began: dict[Transfer, float] = {}

    def begin() -> None:
        for transfer in schedule.begin():
            assert transfer not in left
            left[transfer], began[transfer] = 1.0, now

    begin()
    while left:
        moving = [transfer for transfer in left if now >= began[transfer] + latency]
        up, down = Counter(t.source for t in moving), Counter(t.target for t in moving)
        rates = {t: min(1 / up[t.source], 1 / down[t.target]) for t in moving}
        ends = [left[t] / rate for t, rate in rates.items()]
        ends += [began[t] + latency - now for t in left if t not in rates]
        if lost is not None:
            ends.append(lost[1] - now)
        step = min(ends)
        now += step
        for transfer, rate in rates.items():
            left[transfer] -= rate * step
        for transfer in list(left):
            if now >= began[transfer] + latency and broken(transfer, now):
                del left[transfer]
                schedule.finish(transfer, "no route to host")
            elif left[transfer] < 1e-9:
                del left[transfer]
                run.sent[transfer.source] += 1
                run.transfers.append((began[transfer], now, transfer))
                schedule.finish(transfer)
        if lost is not None and now >= lost[1]:
            host, lost = lost[0], None
            schedule.lose(host)
            for transfer in [t for t in left if host in (t.source, t.target)]:
                del left[transfer]
                if transfer.source == host:
                    schedule.finish(transfer, "the host is gone")
        begin()
    run.seconds = now
    return run
