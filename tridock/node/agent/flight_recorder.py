"""How far each rank's collectives had come, by what torch's flight recorder left when one timed out."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Final, NoReturn

from tridock.contracts import run_folder

_WORLD: Final = "0"
"""The name of the process group of all ranks."""


def last_collectives(folder: Path) -> dict[int, int]:
    """The number of the last collective of all ranks that each rank began; none where nothing was recorded."""
    prefix = folder / run_folder.FLIGHT
    found: dict[int, int] = {}
    for path in prefix.parent.glob(f"{prefix.name}*"):
        number = path.name.removeprefix(prefix.name)
        if number.isdecimal() and (last := _last(path)) is not None:
            found[int(number)] = last
    return found


def _last(path: Path) -> int | None:
    try:
        dump = _Plain(io.BytesIO(path.read_bytes())).load()
        entries = [entry for entry in dump["entries"] if str(entry["process_group"][0]) == _WORLD]
        return max(int(entry["collective_seq_id"]) for entry in entries)
    except (OSError, EOFError, ValueError, LookupError, TypeError, pickle.UnpicklingError):
        return None  # cut short when its process was ended, or of a form that another torch writes


class _Plain(pickle.Unpickler):
    """Lists, dicts, numbers and texts, of which a dump is made: a run's folder may hold anybody's files."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")
