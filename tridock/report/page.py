"""The report as one HTML page without scripts or external files, and its charts as PNG files."""

import base64
import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.events import FAULTS, samples_of
from tridock.contracts.records import Record
from tridock.differences import differences, flattened, shown
from tridock.errors import Problem, RequestError, TridockError, count
from tridock.report.charts import Chart, charts
from tridock.report.drawing import as_png, as_svg
from tridock.report.markup import element, escape, folded, marked_table, one_line, printable, section, table
from tridock.report.plan_text import correction_rows
from tridock.report.subject import Subject, of_log, of_run, plan_rows, stage_rows
from tridock.report.theme import series_colour, style, themed

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser loads nothing for this page, whatever it contains."""
_MOST_EVENTS, _FEW_EVENTS = 400, 60
_MOST_SAMPLES: Final = 50
"""Evaluations whose samples are on the page."""
_DRAWN_RANKS: Final = 256
"""With more ranks the layout is a bitmap: as SVG it would have megabytes."""
_PER_RUN: Final = ("run_id", "created")
"""Fields of a manifest that differ between all runs."""


def page(subjects: Sequence[Subject], charts: Sequence[Chart], now: datetime | None = None) -> str:
    """Returns the page as HTML. ``now`` is its date."""
    moment = f"{now or datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    names = [it.name for it in subjects]
    title = one_line(" and ".join(names if len(names) <= 3 else [names[0], f"{len(names) - 1} others"]), 120)
    sections = [it for it in _sections(subjects, charts) if it[2]]
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in sections)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"{element('title', title)}<style>{style()}</style></head>\n"
        f"<body><header>{element('h1', title)}"
        f"{element('p', f'As of {moment}. {_still_running(subjects)}', class_='soft')}<nav>{links}</nav></header>\n"
        + "\n".join(section(name, heading, content) for name, heading, content in sections)
        + "\n</body></html>\n"
    )


def _still_running(subjects: Sequence[Subject]) -> str:
    running = [it.name for it in subjects if it.summary is not None and it.summary.state == "running"]
    return f"Still running: {', '.join(running)}." if running else ""


def _sections(subjects: Sequence[Subject], charts: Sequence[Chart]) -> Iterator[tuple[str, str, str]]:
    yield "summary", "Summary", _summary(subjects)
    yield "charts", "Charts", _charts(charts)
    yield "samples", "Samples", "".join(_samples(subject, len(subjects)) for subject in subjects)
    yield "plan", "Plan and measurement", "".join(_plan(subject, len(subjects)) for subject in subjects)
    yield "differences", "Differences", _differences(subjects)
    yield "layout", "Layout", "".join(_layout(subject) for subject in subjects)
    yield "events", "Events", "".join(_events(subject) for subject in subjects)
    yield "origin", "Manifest and experiment", "".join(_origin(subject) for subject in subjects)


def _summary(subjects: Sequence[Subject]) -> str:
    names = dict.fromkeys(name for subject in subjects for name, value in subject.rows if value != "-")
    rows = [dict(subject.rows) for subject in subjects]
    chips = "".join(
        f'<p><span class="chip" style="background:{themed(series_colour(number))}"></span>'
        f"{element('strong', one_line(subject.name, 120))} {element('span', subject.source, class_='soft')}</p>"
        for number, subject in enumerate(subjects)
    )
    head = ["", *(one_line(subject.name) for subject in subjects)] if len(subjects) > 1 else [""]
    return chips + table(head, ([name, *(row.get(name, "-") for row in rows)] for name in names))


def _charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return element("p", "Nothing is logged yet.", class_="soft")
    figures = "".join(
        f"<figure>{element('h3', one_line(chart.title, 120))}{chart.svg}{element('figcaption', chart.caption)}</figure>"
        for chart in charts
    )
    return f'<div class="charts">{figures}</div>'


def _samples(subject: Subject, subjects: int) -> str:
    """Returns the model's continuations of the prompts at the last evaluation; those of earlier ones are folded."""
    found = samples_of(subject.events)
    parts = [element("h3", one_line(subject.name, 120))] if found and subjects > 1 else []
    for iteration, rows in sorted(found.items(), reverse=True)[:_MOST_SAMPLES]:
        text = marked_table(("prompt", "text"), ((row, "") for row in rows), kind="samples")
        parts.append(folded(f"After iteration {iteration:,}", text, open_=iteration == max(found)))
    if len(found) > _MOST_SAMPLES:
        more = f"{len(found) - _MOST_SAMPLES:,} earlier evaluations are in {run_folder.EVENTS}."
        parts.append(element("p", more, class_="soft"))
    return "".join(parts)


def _plan(subject: Subject, subjects: int) -> str:
    measured, stages = list(plan_rows(subject)), list(stage_rows(subject))
    if not measured and not stages:
        return ""
    parts = [element("h3", subject.name)] if subjects > 1 else []
    if measured:
        parts.append(table(("", "planned", "measured", "difference"), measured, numbers=(1, 2, 3)))
    if subject.summary is not None and subject.summary.mfu is None:
        note = "On CPU ranks the measured memory is that of the process, including torch and its libraries."
        parts.append(element("p", note, class_="soft"))
    if (correction := subject.correction) is not None:
        command = f"tridock plan --from-run {shlex.quote(subject.source)}"
        text = f"Other plans take these factors over with {command}; by {count(correction.iterations, 'iteration')}."
        factors = table(("", "its plan", "measured", "factor"), correction_rows(correction), numbers=(1, 2, 3))
        parts += [element("p", text, class_="soft"), factors]
    if stages:
        head = ("", "layers", "planned memory per rank")
        parts.append(folded("Planned memory by stage", table(head, stages, numbers=(1, 2))))
    return "".join(parts)


def _differences(subjects: Sequence[Subject]) -> str:
    """Returns a field-by-field comparison of manifests and experiments, or of the arguments in Megatron logs."""
    runs, logs = [it for it in subjects if not it.is_log], [it for it in subjects if it.is_log and it.experiment]
    parts = []
    for kind, among, documents in (
        ("Manifests", runs, [it.manifest for it in runs]),
        ("Experiments", runs, [it.experiment for it in runs]),
        ("Arguments", logs, [it.experiment for it in logs]),
    ):
        if len(among) < 2:
            continue
        found = differences(documents, _PER_RUN)
        parts.append(element("h3", kind))
        if found:
            head = ("field", *(one_line(it.name) for it in among))
            columns = range(1, len(head))
            parts.append(table(head, ((it.field, *it.values) for it in found), mono=(0, *columns)))
        else:
            parts.append(element("p", "No differences."))
    return "".join(parts)


def _layout(subject: Subject) -> str:
    if subject.plan is None:
        return ""
    from tridock.report.pictures import draw

    figure = draw(subject.plan, one_line(subject.name), {})
    label = f"Layout of {one_line(subject.name)}"
    if len(subject.plan.ranks) <= _DRAWN_RANKS:
        picture = as_svg(figure, label, coloured=True)
    else:
        data = base64.b64encode(as_png(figure)).decode()
        picture = f'<img alt="{escape(label)}" src="data:image/png;base64,{data}">'
    return f'<figure class="paper">{picture}</figure>'


def _events(subject: Subject) -> str:
    if not subject.events:
        return ""
    marks = ["fault" if event.get("event") in FAULTS else "" for event in subject.events]
    cells = [(_time(event), str(event.get("event", "?")), _details(event)) for event in subject.events[-_MOST_EVENTS:]]
    rows = list(zip(cells, marks[-_MOST_EVENTS:], strict=True))
    faults = f"{marks.count('fault')} of them failures or restarts"
    title = f"{one_line(subject.name, 120)}: {len(subject.events):,} events, {faults}"
    if len(rows) < len(subject.events):
        title += f"; the last {len(rows)} are shown"
    return folded(title, marked_table(("time (UTC)", "event", ""), rows, kind="events"), open_=len(rows) <= _FEW_EVENTS)


def _time(event: Record) -> str:
    return str(event.get("time", ""))[:19].replace("T", " ")


def _details(event: Record) -> str:
    fields = {name: value for name, value in event.items() if name not in ("time", "event", "samples")}
    return printable(", ".join(f"{name}: {shown(value)}" for name, value in fields.items()), 600)


def _origin(subject: Subject) -> str:
    """Returns the manifest and experiment of a run, folded."""
    documents = {"manifest": subject.manifest, "arguments" if subject.is_log else "experiment": subject.experiment}
    return "".join(
        folded(f"{one_line(subject.name)}: {name}", table(("field", "value"), flattened(document), mono=(0, 1)))
        for name, document in documents.items()
        if document
    )


SUFFIXES = (".html", ".htm")


def write_report(runs: Sequence[Path], logs: Sequence[Path], output: Path) -> list[Path]:
    """Writes the page ``output`` and its charts ``<page>-<chart>.png``. Returns the paths, the page first.

    Raises :class:`RequestError` with all problems of the folders, the logs and ``output``.
    """
    problems: list[Problem] = []
    if output.suffix.lower() not in SUFFIXES:
        got, todo = output.suffix or "no suffix", "end the file's name in .html"
        problems.append(Problem(str(output), "a report is an HTML page", got, todo))
    if not runs and not logs:
        todo = "give runs/<run-id>, a Megatron log with --log, or a cluster with --hosts"
        problems.append(Problem("--run", "is missing", "", todo))
    subjects: list[Subject] = []
    for path, is_log in (*((path, False) for path in runs), *((path, True) for path in logs)):
        try:
            subjects += of_log(path) if is_log else [of_run(path)]
        except TridockError as error:
            problems += error.problems
    RequestError.raise_for(problems)
    drawn = list(charts(subjects))
    written = {output: page(subjects, drawn).encode("utf-8", "replace")}
    written |= {output.with_name(f"{output.stem}-{chart.name}.png"): chart.png for chart in drawn}
    todo = "free some space there, or name a writable folder"
    with RequestError.in_place_of(OSError, output, "cannot be written", todo):
        for path, content in written.items():
            run_folder.write_atomic(path, content)
    return list(written)
