"""What `tridock plan` and `fab plan` print, for people or as JSON, and the exit code that they end with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tridock.errors import RequestError
from tridock.experiment import load_experiment
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.memory import GIB
from tridock.plan.search import Search, search, words_of
from tridock.report import rank_map
from tridock.report.plan_tables import best_words, captions, days_line, render, render_search


@dataclass(frozen=True, slots=True)
class Show:
    """What is asked for."""

    search: bool = False
    json: bool = False
    plot: str = ""


def print_plan(
    config: Path,
    overrides: Sequence[str],
    slots: Mapping[str, Sequence[int]],
    assumptions: Assumptions,
    console: Console,
    show: Show,
) -> int:
    """Plans and prints. Returns 2 where the experiment cannot run or does not fit, else 0.

    Raises :class:`RequestError` for an experiment that cannot be read, but with JSON, which then says so.
    """
    try:
        experiment = load_experiment(config, overrides)
    except RequestError as error:
        if not show.json:
            raise
        sys.stdout.write(_refusal(error))
        return error.exit_code
    assessment = assess(experiment, slots, str(config), assumptions)
    if show.search:
        return _show_search(search(experiment, slots, str(config), assumptions), assessment, console, show)
    return _show_plan(assessment, console, show)


def _show_plan(assessment: Assessment, console: Console, show: Show) -> int:
    refused = assessment.verdict in ("illegal", "no-fit")
    if show.plot and assessment.plan is not None:
        title = assessment.experiment.name
        rank_map.plot(assessment.plan, Path(show.plot), title, captions(assessment))
    if show.json:
        sys.stdout.write(assessment.to_json())
    elif assessment.plan is not None:
        console.print(render(assessment))
        if (line := days_line(assessment)) is not None:
            console.print(line)
    if refused and not show.json:
        try:
            assessment.checked()
        except RequestError as error:
            print(error, file=sys.stderr)
    return RequestError.exit_code if refused else 0


def _show_search(found: Search, assessment: Assessment, console: Console, show: Show) -> int:
    if show.json:
        sys.stdout.write(json.dumps(_document(found, assessment), indent=2) + "\n")
    else:
        console.print(render_search(found, assessment.experiment.name))
        if found.found:
            words = best_words(found, assessment)
            console.print(f"\nThe first: {words or 'the experiment as it is'}", soft_wrap=True)
    return 0 if found.found else RequestError.exit_code


def _refusal(error: RequestError) -> str:
    """The JSON of an experiment that cannot even be read."""
    problems = [{"field": one.where, "message": str(one), "nearest": list(one.nearest)} for one in error.problems]
    empty: dict[str, Any] = {
        "ranks": [],
        "groups": {},
        "memory": {"gpu": None, "limit_gib": None, "stages": []},
        "cost": None,
    }
    return (
        json.dumps({"verdict": "illegal", "problems": problems, "warnings": [], "notes": [], **empty}, indent=2) + "\n"
    )


def _document(found: Search, assessment: Assessment) -> dict[str, Any]:
    return {
        "found": [
            {
                "fields": dict(one.choice),
                "set": words_of(one, assessment.experiment),
                "data_parallel_size": one.data_parallel_size,
                "verdict": one.worst.fit,
                "total_gib": round(one.worst.total_bytes / GIB, 4),
                "seconds": one.seconds,
                "tokens_per_second": one.cost.estimate.tokens_per_second if one.cost.estimate else None,
                "mfu": one.cost.estimate.mfu if one.cost.estimate else None,
            }
            for one in found.found
        ],
        "rejected": [{"fields": dict(one.choice), "reason": one.reason} for one in found.rejected],
    }
