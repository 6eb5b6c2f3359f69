"""The new records of a run on this node for remote watchers, downsampled if there are many."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tridock.contracts import heartbeat, run_folder
from tridock.contracts.node_answers import RankProgress, RunUpdate
from tridock.contracts.records import Record, read_lines, read_plan
from tridock.contracts.run_state import exit_code_of, state_of

_MOST: Final = 3000
"""Maximum number of records in one answer: those of each interval with the lowest and the highest loss."""
_MOST_EVENTS: Final = 200


def run_update(folder: Path, offset: int, inode: int, events: int) -> RunUpdate:
    """Returns the records of ``metrics.jsonl`` after byte ``offset``, of ``events.jsonl`` after line ``events``, and
    the state.

    ``inode`` is that of the previously read file: a resumed run writes a new one, which is read from its start.
    """
    path, state = folder / run_folder.METRICS, state_of(folder)  # the state first: its last records are then read
    records: list[Record] = []
    replaces_earlier = offset == 0
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode or status.st_size < offset:
                offset, replaces_earlier = 0, True
            inode = status.st_ino
            file.seek(offset)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            offset += len(whole)
            records = list(_thinned(whole))
    except FileNotFoundError:
        pass
    known = read_lines(folder / run_folder.EVENTS)
    return RunUpdate(
        state=state,
        exit_code=exit_code_of(folder),
        offset=offset,
        inode=inode,
        replaces_earlier=replaces_earlier,
        records=tuple(records),
        events=tuple(known[events:][-_MOST_EVENTS:]),
        event_count=len(known),
        ranks=tuple(_ranks(folder)),
        plan=_plan(folder) if events == 0 else {},
        age_s=_age(path),
    )


def _plan(folder: Path) -> dict[str, Any]:
    """Returns the parts of the plan that a watcher shows: the ranks' nodes and stages, and the stages' memory."""
    plan = read_plan(folder)
    memory = plan.get("memory")
    stages = (memory.get("stages") if isinstance(memory, dict) else None) or ()
    return {
        "world_size": plan.get("world_size"),
        "layout": plan.get("layout"),
        "ranks": [{name: rank.get(name) for name in ("rank", "node", "pp")} for rank in plan.get("ranks") or ()],
        "stages": [{name: stage.get(name) for name in ("stage", "total_bytes")} for stage in stages],
    }


def _ranks(folder: Path) -> Iterator[RankProgress]:
    """Yields the ranks of all nodes if the supervisor has written them, else those with a heartbeat here."""
    path = folder / run_folder.RANKS
    try:
        since = max(0.0, time.time() - path.stat().st_mtime)
        for rank, phase, iteration, age_s in json.loads(path.read_text()):
            yield RankProgress(rank, phase, iteration, round(age_s + since, 1))
    except (OSError, ValueError):
        now = time.monotonic()
        for rank in heartbeat.ranks(folder):
            if (beat := heartbeat.read(folder, rank)) is not None:
                yield RankProgress(rank, beat.phase, beat.iteration, round(max(0.0, now - beat.time_s), 1))


def _age(path: Path) -> float | None:
    try:
        return round(max(0.0, time.time() - path.stat().st_mtime), 1)
    except FileNotFoundError:
        return None


def _thinned(content: bytes) -> Iterator[Record]:
    """Yields the records; from a long part only evaluations, the first, the last, and two per interval."""
    lines = content.splitlines()
    if len(lines) <= _MOST:
        yield from filter(None, map(_record, lines))
        return
    size = math.ceil(len(lines) / (_MOST // 2))
    for begin in range(0, len(lines), size):
        interval = [record for line in lines[begin : begin + size] if (record := _record(line)) is not None]
        training = [record for record in interval if "split" not in record]
        kept = [record for record in interval if "split" in record]
        if training:
            kept += [min(training, key=_loss), max(training, key=_loss)]
            if begin == 0:
                kept.append(training[0])
            if begin + size >= len(lines):
                kept.append(training[-1])
        numbers = {id(record) for record in kept}
        yield from (record for record in interval if id(record) in numbers)


def _loss(record: Record) -> float:
    """Sort key; a loss that is not finite sorts highest."""
    value = record.get("loss")
    return float(value) if isinstance(value, int | float) else math.inf


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("iteration"), int) else None
