"""Reads a run's records: ``metrics.jsonl``, ``events.jsonl``, ``plan.json``, ``manifest.json``."""

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from tridock.contracts import run_folder
from tridock.contracts.forms import is_node_name
from tridock.errors import Problem, RequestError

Record = dict[str, Any]
Evaluations = dict[str, list[Record]]
_END_BYTES: Final = 1 << 16
_LONGEST_LINE: Final = 4 << 20
"""Bytes. A longer line is no record, and is read in parts."""
_DEEPEST: Final = 20
_MOST: Final = 2.0**1000


def check_run(folder: Path) -> None:
    """Raises :class:`RequestError` if ``folder`` is not a run's folder."""
    if not (folder / run_folder.EXPERIMENT).is_file():
        got = f"no {run_folder.EXPERIMENT} in it" if folder.is_dir() else "no such folder"
        raise RequestError(Problem(str(folder), "is not a run's folder", got, "give runs/<run-id>"))


def read_lines(path: Path, last_bytes: int | None = None) -> list[Record]:
    """Returns the objects of a JSON lines file, or none if it is missing. Skips a line that is still being written.

    ``last_bytes`` reads only the end of the file, because the metrics of a long run are large.
    """
    return list(records_in(path, last_bytes))


def latest(events: Sequence[Record], field: str) -> Any:
    """Returns a field of the last event that has it, or None."""
    return next((event[field] for event in reversed(events) if field in event), None)


def last_iterations(folder: Path) -> list[Record]:
    """Returns the last logged iterations in order, from the end of ``metrics.jsonl``; none if it cannot be read."""
    path = folder / run_folder.METRICS
    found = read_lines(path, _END_BYTES) if path.is_file() else []
    return [record for record in found if "iteration" in record and "split" not in record]


def read_metrics(folder: Path) -> tuple[list[Record], Evaluations]:
    """Returns the logged iterations in order, and the evaluations by split.

    A run that resumed from a checkpoint in its own folder logs some iterations twice; the later record counts.
    """
    iterations: dict[int, Record] = {}
    evaluations: dict[str, dict[int, Record]] = {}
    for record in records_in(folder / run_folder.METRICS):
        if "iteration" not in record:
            continue
        if "split" in record:
            evaluations.setdefault(str(record["split"]), {})[record["iteration"]] = record
        else:
            iterations[record["iteration"]] = record
    return _in_order(iterations), {split: _in_order(records) for split, records in evaluations.items()}


def record_of(line: str | bytes) -> Record | None:
    """Returns the object in a line of JSON, or None if it is none: whatever it holds, each reader can go on.

    A known field has the type that its readers expect; a number may be None. Other such values are left out. What is
    not finite, or nested deeply, is None.
    """
    try:
        record = _decoded(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    fits = {name for name, value in record.items() if name not in _FORMS or _fits(value, _FORMS[name])}
    kept = fits | _NUMBERS
    return {sys.intern(name): it if name in fits else None for name, it in record.items() if name in kept}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_NUMBERS: Final = {
    *("loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "samples_per_second"),
    *("consumed_samples", "loss_scale", "skipped_steps", "seconds", "pause_seconds", "exposed", "in_flight"),
}
_FORMS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("iteration", "rank", "exit_code", "world_size", "log_bytes", "attempt"), _is_whole),
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(("peak_memory_bytes", "padded_vocab_size", "free_bytes", "total_bytes"), _is_whole),
    **dict.fromkeys(("event", "time", "node", "cause", "reason", "device"), _is_text),
    "problem": dict.fromkeys(("where", "what", "got", "todo"), _is_text),
    "memory_bytes": [_is_number],
    "peak_memory_by_rank": [_is_number],
}
"""What the fields of metrics and events hold, unless a record is damaged or forged."""
_TERM: Final = {"name": _is_text, "bytes": _is_whole}
_STAGE: Final = {"stage": _is_whole, "total_bytes": _is_whole, "terms": [_TERM]}
_RANKS: Final = [
    {
        "rank": _is_whole,
        "node": lambda it: isinstance(it, str) and is_node_name(it),
        "slot": lambda it: _is_whole(it) and 0 <= it < 2**16,
        "pp": lambda it: it is None or (_is_whole(it) and 0 <= it < 2**16),
    }
]
_MEMORY: Final = {
    "stages": [_STAGE],
    "gpu": lambda it: it is None or _is_text(it),
    "limit_gib": lambda it: it is None or _is_number(it),
}


def _fits(value: object, form: Any) -> bool:
    """Whether a value has the form: a predicate, a list of one form, or the forms of an object's fields."""
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(it, form[0]) for it in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), it) for name, it in form.items())
    return bool(form(value))


class Lines:
    """The lines that are appended to a JSON lines file after byte ``offset``.

    A run that resumes truncates its metrics and rewrites them as another file, which is read from the start.
    """

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        self.offset, self.inode = offset, inode
        self._path = path

    def new(self) -> Iterator[bytes]:
        """Yields new lines in order; an incomplete one is left for a later call."""
        if not self._path.is_file():  # a FIFO has no end
            return
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.inode, self.offset = status.st_ino, 0
            file.seek(self.offset)
            for line in lines_in(file):
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                    return
                self.offset += len(line)
                yield line

    def new_records(self) -> Iterator[Record]:
        """Yields the objects in new lines."""
        yield from filter(None, map(record_of, self.new()))


def read_plan(folder: Path) -> Record:
    """Returns ``plan.json``, or an empty object if it is missing or damaged."""
    return whole_plan(read_object(folder / run_folder.PLAN))


def whole_plan(plan: Any) -> Record:
    """Returns a plan, or an empty object if it is none: its ranks are on nodes that can be nodes."""
    known = isinstance(plan, dict) and _fits(plan.get("ranks", []), _RANKS) and _is_whole(plan.get("world_size", 0))
    if not known or not 0 <= plan.get("world_size", 0) < 2**30:
        return {}
    return plan if plan.get("memory") is None or _fits(plan["memory"], _MEMORY) else {}


def slots_of(plan: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the slots in use on each node, in rank order; empty without a plan."""
    slots: dict[str, tuple[int, ...]] = {}
    for rank in plan.get("ranks", ()):
        slots[rank["node"]] = (*slots.get(rank["node"], ()), rank["slot"])
    return slots


def read_object(path: Path) -> Record:
    """Returns the object in a JSON file, or an empty one if it is missing or damaged."""
    return content if isinstance(content := read_value(path), dict) else {}


def read_value(path: Path) -> Any:
    """Returns what is in a JSON file, or None if it is missing or damaged."""
    try:
        return _decoded(path.read_bytes()) if path.is_file() else None  # a FIFO has no end
    except (OSError, ValueError, RecursionError):
        return None


def records_in(path: Path, last_bytes: int | None = None) -> Iterator[Record]:
    """Yields what :func:`read_lines` returns, one by one: the metrics of a long run do not fit into memory."""
    if not path.exists():
        return
    with RequestError.in_place_of(OSError, path, "cannot be read", "make it a file that you can read"):
        if not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "Not a regular file")  # a FIFO has no end
        file = path.open("rb")
    with file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for line in lines_in(file):
            if (record := record_of(line)) is not None:
                yield record


def lines_in(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the rest of a file of records by lines, one that is too long for a record in parts."""
    return iter(lambda: file.readline(_LONGEST_LINE), b"")


def _decoded(data: str | bytes) -> Any:
    """Decodes JSON; replaces lone surrogates, which no file or chart can hold, with question marks."""
    text = data if isinstance(data, str) else data.decode()
    content = _bounded(json.loads(text))
    if "\\ud" not in text.lower():
        return content
    return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))


def _bounded(value: Any, depth: int = 0) -> Any:
    """Returns what can be written as JSON again, and computed with: None for what is nested deeply or not finite."""
    if isinstance(value, dict | list) and depth == _DEEPEST:
        return None
    if isinstance(value, dict):
        return {name: _bounded(it, depth + 1) for name, it in value.items()}
    if isinstance(value, list):
        return [_bounded(it, depth + 1) for it in value]
    return None if isinstance(value, int | float) and not abs(value) < _MOST else value


def _in_order(records: dict[int, Record]) -> list[Record]:
    return [records[iteration] for iteration in sorted(records)]
