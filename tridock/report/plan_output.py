"""What `tridock plan` prints, as tables or JSON, and their exit code."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tridock.errors import RequestError, count
from tridock.experiment import load_experiment
from tridock.experiment.model import Model
from tridock.layout.plan import layout_label
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.cost import Cost, seconds_of
from tridock.plan.memory import GIB, StageMemory
from tridock.plan.search import Candidate, Search, overrides_of, reasons, search
from tridock.report import rank_map
from tridock.report.rank_picture import plot as plot_rank_map


@dataclass(frozen=True, slots=True)
class Show:
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
    """Plans and prints. Returns 2 if the experiment cannot run or does not fit, else 0.

    Raises :class:`RequestError` if the experiment is invalid; with JSON it prints the problems instead.
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
        return _print_search(search(experiment, slots, str(config), assumptions), assessment, console, show)
    return _print_plan(assessment, console, show)


def _print_plan(assessment: Assessment, console: Console, show: Show) -> int:
    refused = assessment.verdict in ("illegal", "no-fit")
    if show.plot and assessment.plan is not None:
        title = assessment.experiment.name
        plot_rank_map(assessment.plan, Path(show.plot), title, captions(assessment))
    if show.json:
        sys.stdout.write(assessment.to_json())
    elif assessment.plan is not None:
        # A pipe gets whole lines, a terminal lines that end between words.
        console.print(render(assessment), soft_wrap=not console.is_terminal)
        if (line := days_line(assessment)) is not None:
            console.print(line)
    if refused and not show.json:
        try:
            assessment.checked()
        except RequestError as error:
            print(error, file=sys.stderr)
    return RequestError.exit_code if refused else 0


def _print_search(found: Search, assessment: Assessment, console: Console, show: Show) -> int:
    if show.json:
        sys.stdout.write(json.dumps(_document(found, assessment), indent=2) + "\n")
    else:
        console.print(render_search(found, assessment.experiment.name))
        if found.found:
            changes = overrides_of(found.found[0], assessment.experiment)
            options = " ".join(f"--set {change}" for change in changes)
            console.print(f"\nBest layout: {options or 'the experiment as it is'}", soft_wrap=True)
    return 0 if found.found else RequestError.exit_code


def _refusal(error: RequestError) -> str:
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
                "set": overrides_of(one, assessment.experiment),
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


_STYLES = {"fits": "green", "tight": "dark_orange3", "no-fit": "bold red", "illegal": "bold red"}
_LABELS = {"fits": "fits", "tight": "tight: over 80 %", "no-fit": "does not fit", "illegal": "cannot run"}
_MOST_COLUMNS = 4
_MOST_LAYOUTS = 12
_MOST_REASONS = 8


def headline(assessment: Assessment) -> Text:
    """Returns one line: verdict, layout, memory of the highest rank, time."""
    plan, gpu, text = assessment.plan, assessment.assumptions.gpu, Text()
    if plan is None:
        return text.append(_LABELS["illegal"], _STYLES["illegal"])
    judged = gpu is not None
    text.append(_LABELS[assessment.verdict] if judged else "can run", _STYLES[assessment.verdict])
    ranks = count(plan.world_size, "rank")
    text.append(f" · {plan.layout} · {ranks} · {assessment.worst.total_bytes / GIB:.2f} GiB per rank")
    if gpu is not None:
        text.append(f" of {gpu.memory_bytes / GIB:.1f} ({gpu.name})")
    if assessment.cost is not None and assessment.cost.estimate is not None:
        text.append(f" · about {_seconds(assessment.cost.estimate.iteration)} per iteration")
    return text


def summary(assessment: Assessment) -> Group:
    """Returns the plan without its traffic and the sources of its numbers."""
    parts: list[RenderableType] = [headline(assessment), "", _facts(assessment), ""]
    return Group(*parts, rank_map.render(assessment.laid_out, captions(assessment)), "", memory_table(assessment))


def render(assessment: Assessment) -> Group:
    assert assessment.cost is not None
    cost_table = _cost_table(assessment.cost, assessment.experiment.model)
    parts: list[RenderableType] = [summary(assessment), _sources(assessment), "", cost_table]
    if assessment.cost.traffic:
        parts += ["", _traffic_table(assessment.cost)]
    parts += [Text(f"warning: {warning}", "dark_orange3") for warning in assessment.warnings]
    parts += [Text(f"note: {note}", "dim") for note in assessment.notes]
    return Group(*parts)


def captions(assessment: Assessment) -> dict[int, str]:
    """Returns the text of each stage in the legend of the rank map."""
    judged = assessment.assumptions.gpu is not None
    return {
        stage.stage: f"{stage.total_bytes / GIB:.1f} GiB" + (f", {_LABELS[stage.fit]}" if judged else "")
        for stage in assessment.memory
    }


def _facts(assessment: Assessment) -> Table:
    plan, cost, experiment = assessment.plan, assessment.cost, assessment.experiment
    assert plan is not None
    assert cost is not None
    nodes = len({rank.node for rank in plan.ranks})
    replicas, steps = count(plan.data_parallel_size, "replica"), count(plan.accumulation_steps, "step")
    samples, tokens = count(plan.global_batch_size, "sample"), f"{plan.tokens_per_step:,} {experiment.model.unit}"
    batch = f"micro batch {plan.micro_batch_size} x {replicas} x {steps} = {samples}, {tokens} per iteration"
    rows = (
        ("experiment", f"{experiment.name}, engine {experiment.engine}, {experiment.precision}"),
        ("cluster", f"{count(plan.world_size, 'slot')} on {count(nodes, 'node')}"),
        ("layout", plan.layout),
        ("batch", batch),
        ("parameters", f"{cost.parameters:,}"),
    )
    return _pairs(rows)


def _pairs(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def memory_table(assessment: Assessment) -> Table:
    """Returns a row per term and a column per stage; of many stages the first two, the highest and the last."""
    stages = _columns(assessment.memory)
    gpu = assessment.assumptions.gpu
    of = f", of {gpu.memory_bytes / GIB:.1f} GiB ({gpu.name})" if gpu is not None else ""
    table = _table(f"Memory per rank in GiB{of}")
    table.add_column("")
    for stage in stages:
        table.add_column(f"stage {stage.stage}", justify="right")
    for name in _names(assessment.memory):
        amounts = [next((term.bytes for term in stage.terms if term.name == name), 0) for stage in stages]
        table.add_row(name, *(_gib(amount) for amount in amounts))
    table.add_section()
    table.add_row(Text("total", "bold"), *(Text(_gib(stage.total_bytes), "bold") for stage in stages))
    if gpu is not None:
        shares = [Text(f"{stage.share:.0%} {stage.fit.removesuffix('-fit')}", _STYLES[stage.fit]) for stage in stages]
        table.add_row("share of GPU", *shares)
    if any(stage.copied_bytes for stage in stages):
        copies = (_gib(stage.copied_bytes) for stage in stages)
        table.add_row("copy of a checkpoint, in the host's memory", *copies, style="dim")
    table.add_row("layers", *(str(stage.layers) for stage in stages), style="dim")
    table.add_row("parameters", *(_count_short(stage.parameters.total) for stage in stages), style="dim")
    return table


def _names(stages: Sequence[StageMemory]) -> list[str]:
    """Returns the names of all terms, in an order that agrees with every stage."""
    names: list[str] = []
    for stage in stages:
        place = 0
        for term in stage.terms:
            if term.name in names:
                place = names.index(term.name) + 1
            else:
                names.insert(place, term.name)
                place += 1
    return names


def _sources(assessment: Assessment) -> Text:
    """Returns what each term is, and the source of its formula."""
    found = {term.name: term.source for stage in reversed(assessment.memory) for term in stage.terms}
    lines: dict[str, list[str]] = {}
    for name in _names(assessment.memory):
        lines.setdefault(found[name], []).append(name)
    return Text("\n".join(f"{', '.join(names)}: {source}" for source, names in lines.items()), "dim")


def _columns(stages: Sequence[StageMemory]) -> list[StageMemory]:
    if len(stages) <= _MOST_COLUMNS:
        return list(stages)
    worst = max(stages, key=lambda stage: stage.total_bytes)
    chosen = {0, 1, worst.stage, len(stages) - 1}
    return [stage for stage in stages if stage.stage in chosen]


def _cost_table(cost: Cost, model: Model) -> Table:
    causal = "" if model.is_vision else f" ({_flops(cost.causal_flops)} with causal attention counted as half)"
    rows = [
        ("model FLOPs", f"{_flops(cost.model_flops)}{causal}"),
        ("hardware FLOPs", f"{_flops(cost.hardware_flops)} with recomputation"),
        ("pipeline bubble", f"{cost.bubble:.1%} of the time"),
        *_estimated(cost, model),
    ]
    table = _pairs(rows)
    table.title, table.title_justify, table.title_style = "Cost of an iteration", "left", "bold"
    return table


def _estimated(cost: Cost, model: Model) -> Iterator[tuple[str, str]]:
    estimate, rates = cost.estimate, cost.rates
    if estimate is None:
        convolutions, products = (
            "the GPU's rate for convolutions is unknown (--tflops)",
            "the GPU is unknown (--gpu)",
        )
        yield "time", f"not estimated: {convolutions if model.is_vision else products}"
        return
    parts = {
        "computing": estimate.compute,
        "bubble": estimate.bubble,
        "inside layers": estimate.tensor_and_context,
        "between stages": estimate.pipeline,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
    }
    shares = ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items() if value >= 0.0005)
    yield "time", f"about {_seconds(estimate.iteration)}: {shares}"
    yield (
        "rates",
        f"{rates.tflops:,.0f} TFLOP/s per GPU ({rates.tflops_source}), {rates.network_gb_s * 8:g} Gbit/s per node",
    )
    per_day = _count_short(estimate.tokens_per_second * 86400)
    yield "speed", f"about {estimate.tokens_per_second:,.0f} {model.unit}/s, {per_day} {model.unit} per day"
    if estimate.mfu is not None:
        yield "MFU", f"about {estimate.mfu:.0%}"


def days_line(assessment: Assessment) -> str | None:
    cost = assessment.cost
    if cost is None or (days := cost.days(assessment.tokens)) is None:
        return None
    counted = f"{_count_short(assessment.tokens)} {assessment.experiment.model.unit}"
    for length, unit in ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes"), (1 / 86400, "seconds")):
        if days >= length:
            return f"{counted} take about {days / length:,.1f} {unit}"
    return f"{counted} take less than a second"


def _traffic_table(cost: Cost) -> Table:
    table = _table("Traffic per rank and iteration")
    for name in ("group", "ranks", "link", "GiB", "seconds"):
        table.add_column(name, justify="left" if name in ("group", "link") else "right")
    for one in cost.traffic:
        seconds = "-" if cost.estimate is None else f"{seconds_of(one, cost.rates):.3f}"
        link = "between nodes" if one.link == "network" else "within a node"
        table.add_row(one.group, str(one.size), link, f"{one.bytes_per_rank / GIB:.3f}", seconds)
    return table


def render_search(found: Search, name: str) -> Group:
    table = _table(f"Layouts of {name}, best first")
    table.padding = (0, 1, 0, 0)
    unit = next((one.experiment.model.unit for one in found.found), "tokens")
    for column in ("", "layout", "mb", "states", "recompute", "GiB", "GPU", "time", f"{unit}/s", "MFU"):
        left = column in ("layout", "states", "recompute")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "layout")
    for number, one in enumerate(found.found[:_MOST_LAYOUTS], start=1):
        table.add_row(str(number), *_candidate_row(one))
    legend = "mb: micro batch; states: ZeRO stage or distributed optimizer; recompute: full or selective"
    parts: list[RenderableType] = [table, Text(legend, "dim")]
    omitted = len(found.found) - _MOST_LAYOUTS
    if omitted > 0:
        parts.append(f"and {count(omitted, 'more layout')} that fit{'s' if omitted == 1 else ''}")
    if found.rejected:
        parts += ["", Text(f"{len(found.rejected):,} others do not work:", "bold")]
        counted = reasons(found.rejected)
        parts += [f"{number:>6,}  {reason}" for reason, number in counted[:_MOST_REASONS]]
        rest = sum(number for _, number in counted[_MOST_REASONS:])
        if rest:
            parts.append(f"{rest:>6,}  for other reasons (--json lists all)")
    return Group(*parts)


def _candidate_row(one: Candidate) -> Iterator[str | Text]:
    parallel, model = one.experiment.parallel, one.experiment.model
    estimate = one.cost.estimate
    assert estimate is not None
    yield layout_label(parallel, one.data_parallel_size) + (" SP" if parallel.sequence_parallel else "")
    yield str(one.experiment.batch.micro_batch_size)
    yield (
        f"ZeRO-{parallel.zero_stage}" if parallel.zero_stage else "dist" if parallel.use_distributed_optimizer else ""
    )
    full = model.checkpoint_activations or model.recompute_granularity == "full"
    yield "full" if full else "sel" if model.recompute_granularity else ""
    yield f"{one.worst.total_bytes / GIB:.1f}"
    yield Text(f"{one.worst.share or 0:.0%}", _STYLES[one.worst.fit])
    yield _seconds(one.seconds)
    yield f"{estimate.tokens_per_second:,.0f}"
    yield "-" if estimate.mfu is None else f"{estimate.mfu:.0%}"


def _table(title: str) -> Table:
    # At least as wide as its title, which would otherwise wrap.
    width = len(title)
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, min_width=width
    )


def _gib(amount: int) -> str:
    return "-" if amount == 0 else f"{amount / GIB:.3f}" if amount >= GIB / 1000 else "<0.001"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _flops(value: float) -> str:
    for size, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if value >= size:
            return f"{value / size:,.2f} {name}"
    return f"{value / 1e9:,.2f} GFLOP"


def _count_short(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.1f} {name}"
    return f"{value:,.0f}"
