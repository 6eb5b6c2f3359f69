"""Writes a Megatron log as run folders, for programs that read those."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from tridock.contracts import run_folder
from tridock.report.subject import Subject, of_log

_HEAD_BYTES = 1 << 16


def write_log_folders(log: Path, runs: Path) -> list[Path]:
    """Writes a folder for each run in the log into ``runs``; returns the folders.

    A folder's name is the log's name and a digest of the log's beginning, so it stays the same as the log grows. Raises
    :class:`RequestError` if the file is not a Megatron log.
    """
    subjects = of_log(log)
    with log.open("rb") as file:
        digest = hashlib.sha256(file.read(_HEAD_BYTES if log.stat().st_size >= _HEAD_BYTES else 256)).hexdigest()[:8]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", log.stem).strip("-.") or "log"
    folders = []
    for number, subject in enumerate(subjects):
        folder = runs / f"{stem}-{digest}{f'-{number + 1}' if number else ''}"
        lines = "".join(f"{line}\n" for line in _records(subject))
        run_folder.write_atomic(folder / run_folder.METRICS, lines.encode())
        run_folder.write_atomic(folder / run_folder.LOG_ARGUMENTS, json.dumps(dict(subject.experiment)).encode())
        run_folder.write_atomic(folder / run_folder.EXIT_CODE, b"0\n")
        folders.append(folder)
    return folders


def _records(subject: Subject) -> Iterator[str]:
    curves = {name: subject.columns.curve(name) for name in subject.columns.names()}
    iterations = next(iter(curves.values())).x if curves else ()
    for row, iteration in enumerate(iterations):
        values = {name: curve.y[row] for name, curve in curves.items() if math.isfinite(curve.y[row])}
        yield json.dumps({"iteration": int(iteration), **values})
    for split, curve in subject.evaluations.items():
        for iteration, loss in zip(curve.x, curve.y, strict=True):
            if math.isfinite(loss):
                yield json.dumps({"iteration": int(iteration), "split": split, "loss": loss})
