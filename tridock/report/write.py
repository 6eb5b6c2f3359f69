"""A report's files: the page, and its charts as PNGs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError, TridockError
from tridock.report.charts import charts
from tridock.report.log_subject import of_log
from tridock.report.page import page
from tridock.report.subject import Subject, of_run

SUFFIXES = (".html", ".htm")


def write_report(runs: Sequence[Path], logs: Sequence[Path], output: Path) -> list[Path]:
    """Writes the page ``output`` and ``<its name>-<chart>.png`` beside it; returns all of them, the page first.

    Raises :class:`RequestError` with everything that is wrong with the folders, the logs and ``output``.
    """
    problems: list[Problem] = []
    if output.suffix.lower() not in SUFFIXES:
        got, todo = output.suffix or "no suffix", "end the file's name in .html"
        problems.append(Problem(str(output), "a report is an HTML page", got, todo))
    if not runs and not logs:
        problems.append(Problem("RUN", "is missing", "", "give runs/<run-id>, or a Megatron log with --log"))
    subjects: list[Subject] = []
    for folder in runs:
        try:
            subjects.append(of_run(folder))
        except TridockError as error:
            problems += error.problems
    for path in logs:
        try:
            subjects += of_log(path)
        except TridockError as error:
            problems += error.problems
    if problems:
        raise RequestError(problems)
    drawn = list(charts(subjects))
    written = {output: page(subjects, drawn).encode("utf-8", "replace")}
    written |= {output.with_name(f"{output.stem}-{chart.name}.png"): chart.png for chart in drawn}
    try:
        for path, content in written.items():
            run_folder.write_atomic(path, content)
    except OSError as error:
        todo = "make room there, or name a folder that can be written"
        raise RequestError(Problem(str(output), "cannot be written", error.strerror or str(error), todo)) from None
    return list(written)
