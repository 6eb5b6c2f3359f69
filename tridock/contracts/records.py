"""Reads a run's records: ``metrics.jsonl``, ``events.jsonl``, ``plan.json``, ``manifest.json``."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError, printable

Record = dict[str, Any]
Evaluations = dict[str, list[Record]]


def check_run(folder: Path) -> None:
    """Raises :class:`RequestError` if ``folder`` is not a run's folder."""
    if not (folder / run_folder.EXPERIMENT).is_file():
        got = f"no {run_folder.EXPERIMENT} in it" if folder.is_dir() else "no such folder"
        raise RequestError(Problem(str(folder), "is not a run's folder", got, "give runs/<run-id>"))


def read_lines(path: Path, last_bytes: int | None = None) -> list[Record]:
    """Returns the objects of a JSON lines file, or none if it is missing. Skips a line that is still being written.

    ``last_bytes`` reads only the end of the file, because the metrics of a long run are large.
    """
    return list(_objects(path, last_bytes))


def read_metrics(folder: Path) -> tuple[list[Record], Evaluations]:
    """Returns the logged iterations in order, and the evaluations by split.

    A run that resumed from a checkpoint in its own folder logs some iterations twice; the later record counts.
    """
    iterations: dict[int, Record] = {}
    evaluations: dict[str, dict[int, Record]] = {}
    for record in _objects(folder / run_folder.METRICS):
        if not isinstance(record.get("iteration"), int):
            continue
        for name in _NUMBERS & record.keys():
            record[name] = record[name] if _is_number(record[name]) else None
        if "split" in record:
            evaluations.setdefault(str(record["split"]), {})[record["iteration"]] = record
        else:
            iterations[record["iteration"]] = record
    return _in_order(iterations), {split: _in_order(records) for split, records in evaluations.items()}


_NUMBERS = {"loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "samples_per_second", "consumed_samples"}
_MOST = 2**1000


def _is_number(value: object) -> bool:
    """Whether charts and tables can show the value, which may come from a damaged record."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)


def read_plan(folder: Path) -> Record:
    """Returns ``plan.json``, or an empty object if it is missing or damaged."""
    plan = read_object(folder / run_folder.PLAN)
    ranks = plan.get("ranks", [])
    whole = isinstance(ranks, list) and all(isinstance(rank, dict) for rank in ranks)
    return plan if whole and all(_is_name(rank.get("node")) for rank in ranks) else {}


def _is_name(value: object) -> bool:
    """Whether the value can be a node's name, which a terminal shows as it is."""
    return isinstance(value, str) and printable(value) == value


def slots_of(plan: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the slots in use on each node, in rank order; empty without a plan."""
    slots: dict[str, tuple[int, ...]] = {}
    for rank in plan.get("ranks", ()):
        slots[rank["node"]] = (*slots.get(rank["node"], ()), rank["slot"])
    return slots


def read_object(path: Path) -> Record:
    """Returns the object in a JSON file, or an empty one if it is missing or damaged."""
    try:
        content = _decoded(path.read_bytes()) if path.is_file() else None  # a FIFO has no end
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _objects(path: Path, last_bytes: int | None = None) -> Iterator[Record]:
    # Line by line, because the metrics of a long run are large.
    try:
        if not (path.is_file() or path.is_dir() or not path.exists()):
            raise OSError(errno.EINVAL, "Not a regular file")  # a FIFO has no end
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        got = error.strerror or str(error)
        raise RequestError(Problem(str(path), "cannot be read", got, "make it a file that you can read")) from None
    with file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for line in file:
            try:
                record = _decoded(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _decoded(data: bytes) -> Any:
    """Decodes JSON; replaces lone surrogates, which no file or chart can hold, with question marks."""
    content = json.loads(data.decode())
    if b"\\ud" not in data.lower():
        return content
    return json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))


def _in_order(records: dict[int, Record]) -> list[Record]:
    return [records[iteration] for iteration in sorted(records)]
