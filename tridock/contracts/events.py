"""``events.jsonl`` from the supervisor's side: the ranks write the same file with the same form."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from tridock.contracts import run_folder


def append_event(folder: Path, event: str, **fields: object) -> None:
    """Adds one line; a single write, so that lines of several writers stay whole."""
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})
    with (folder / run_folder.EVENTS).open("a") as file:
        file.write(line + "\n")


def has_event(folder: Path, event: str) -> bool:
    """Whether the run has recorded an event of this name."""
    return any(entry.get("event") == event for entry in read_lines(folder / run_folder.EVENTS))


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, object]]:
    """The objects of a JSON-lines file; a line that is still being written is left out.

    ``last_bytes`` reads the end of the file only: a long run's metrics are long.
    """
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
            content = file.read()
    except FileNotFoundError:
        return []
    entries = []
    for line in content.split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
