"""The new records of a run on this node for remote watchers, downsampled if there are many."""

import math
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.events import samples_of
from tridock.contracts.node_answers import RankProgress, RunUpdate
from tridock.contracts.records import Lines, Record, read_plan, read_value, record_of, records_in
from tridock.contracts.run_state import exit_code_of, state_of

_MOST: Final = 3000
"""Maximum number of records in one answer: those of each interval with the lowest and the highest loss."""
_MOST_EVENTS: Final = 200
_LOSS: Final = re.compile(rb'"loss": (-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)[,}]')


def run_update(folder: Path, offset: int, inode: int, events: int) -> RunUpdate:
    """Returns the records of ``metrics.jsonl`` after byte ``offset``, of ``events.jsonl`` after line ``events``, and
    the state.

    ``inode`` is that of the previously read file: a resumed run writes a new one, which is read from its start.
    """
    path, state = folder / run_folder.METRICS, state_of(folder)  # the state first: its last records are then read
    appended, count, size = Lines(path, offset, inode), 0, 0
    for line in appended.new():
        count, size = count + 1, size + len(line)
    again = islice(Lines(path, offset, inode).new(), count)  # they do not all fit into memory
    known, last, texts = 0, deque[Record](maxlen=_MOST_EVENTS), Record()  # only the newest samples have their texts
    for known, event in enumerate(records_in(folder / run_folder.EVENTS), 1):
        if known > events:
            last.append(event)
            if samples_of((event,)):
                texts.pop("samples", None)
                texts = event
    return RunUpdate(
        state=state,
        exit_code=exit_code_of(folder),
        offset=appended.offset,
        inode=appended.inode,
        replaces_earlier=appended.offset == size,
        records=tuple(_thinned(again, count)),
        events=tuple(last),
        event_count=known,
        ranks=tuple(_ranks(folder)),
        plan=_plan(folder) if events == 0 else {},
        age_s=_age(path),
    )


def _plan(folder: Path) -> dict[str, Any]:
    """Returns the parts of the plan that a watcher shows: the ranks' nodes and stages, and the stages' memory."""
    plan = read_plan(folder)
    stages = (plan.get("memory") or {}).get("stages", ())
    return {
        "world_size": plan.get("world_size"),
        "layout": plan.get("layout"),
        "ranks": [{name: rank.get(name) for name in ("rank", "node", "pp")} for rank in plan.get("ranks") or ()],
        "stages": [{name: stage.get(name) for name in ("stage", "total_bytes")} for stage in stages],
    }


def _ranks(folder: Path) -> Iterator[RankProgress]:
    """Yields the ranks of all nodes, as the supervisor has written them."""
    path = folder / run_folder.RANKS
    with suppress(OSError, ValueError, TypeError):
        since = max(0.0, time.time() - path.stat().st_mtime)
        for rank, phase, iteration, age_s, limit in read_value(path):
            limit_s = None if limit is None else float(limit)
            yield RankProgress(int(rank), str(phase), int(iteration), round(float(age_s) + since, 1), limit_s)


def _age(path: Path) -> float | None:
    try:
        return round(max(0.0, time.time() - path.stat().st_mtime), 1)
    except OSError:
        return None


def _thinned(lines: Iterable[bytes], count: int) -> Iterator[Record]:
    """Yields the records of so many lines; of many only evaluations, the first, the last, and two per interval."""
    if count <= _MOST:
        yield from filter(None, map(_record, lines))
        return
    size = math.ceil(count / (_MOST // 2))
    for begin in range(0, count, size):
        interval = list(islice(lines, size))
        training = [line for line in interval if b'"split"' not in line]
        kept = {id(line) for line in interval if b'"split"' in line}
        if training:
            kept |= {id(min(training, key=_loss)), id(max(training, key=_loss))}
            if begin == 0:
                kept.add(id(training[0]))
            if begin + size >= count:
                kept.add(id(training[-1]))
        yield from filter(None, (_record(line) for line in interval if id(line) in kept))


def _loss(line: bytes) -> float:
    """Sort key; a loss that is not finite sorts highest. Decoding millions of lines would take minutes."""
    found = _LOSS.search(line)
    return float(found[1]) if found else math.inf


def _record(line: bytes) -> Record | None:
    record = record_of(line)
    return record if record is not None and "iteration" in record else None
