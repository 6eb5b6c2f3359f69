"""The output of `tridock plan`, as tables or JSON, and its exit code."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tridock.contracts.hang_limits import described
from tridock.engines import ENGINES
from tridock.engines.offload import Offload
from tridock.errors import Problem, RequestError, count
from tridock.experiment import Experiment, load_experiment
from tridock.layout.plan import Slots, layout_label
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.correction import Correction
from tridock.plan.cost import Cost
from tridock.plan.memory import GIB, StageMemory
from tridock.plan.search import Candidate, Search, count_reasons, overrides_of, search
from tridock.plan.why import states_of
from tridock.progress import bars
from tridock.report.pictures import plot as plot_rank_map
from tridock.report.pictures import plot_pareto_front
from tridock.report.plan_text import (
    LABELS,
    STYLES,
    correction_rows,
    count_short,
    days_line,
    flops,
    gib,
    goodput_line,
    headed_table,
    interval,
    seconds,
)
from tridock.report.rank_map import RankMap


@dataclass(frozen=True, slots=True)
class Show:
    """What ``tridock plan`` prints and draws."""

    search: bool = False
    json: Callable[..., None] | None = None
    """Prints the fields of a JSON document, instead of text."""
    plot: str = ""
    quiet: bool = False


def print_plan(
    config: Path, overrides: Sequence[str], slots: Slots, assumptions: Assumptions, console: Console, show: Show
) -> int:
    """Plans an experiment and prints the plan. Returns 2 if it cannot run or does not fit, else 0.

    Raises :class:`RequestError` if the experiment is invalid.
    """
    experiment = load_experiment(config, overrides)
    assessment = assess(experiment, slots, str(config), assumptions)
    if show.search:
        with bars(quiet=show.quiet) as begin:
            bar = begin("search", None, unit="layouts")
            found = search(experiment, slots, str(config), assumptions, bar.set)
        return _print_search(found, assessment, console, show)
    return _print_plan(assessment, console, show)


def _print_plan(assessment: Assessment, console: Console, show: Show) -> int:
    refused = assessment.verdict in ("illegal", "no-fit")
    if show.plot and assessment.plan is not None:
        title = assessment.experiment.name
        plot_rank_map(assessment.plan, Path(show.plot), title, captions(assessment))
    if show.json is not None:
        show.json(**assessment.document())
    elif assessment.plan is not None:
        console.print(render(assessment), soft_wrap=False)
    if refused and show.json is None:
        try:
            assessment.checked()
        except RequestError as error:
            print(error, file=sys.stderr)
    return RequestError.exit_code if refused else 0


def _print_search(found: Search, assessment: Assessment, console: Console, show: Show) -> int:
    todo = "use more GPUs, GPUs with more memory, or a smaller model"
    if found.rejected and not any(one.is_legal for one in found.rejected):
        todo = f"correct the experiment: {count_reasons(found.rejected)[0][0]}"
    none = RequestError(Problem(assessment.source, f"none of {count(len(found.rejected), 'layout')} works", "", todo))
    if show.plot and found.found:
        plot_pareto_front(found, assessment.experiment.name, Path(show.plot))
    if show.json is not None:
        show.json(**_document(found, assessment, () if found.found else none.problems))
    else:
        console.print(render_search(found, assessment.experiment.name))
        if (correction := assessment.assumptions.correction) is not None:
            console.print(correction_table(correction))
        if found.found:
            options = as_options(overrides_of(found.found[0], assessment.experiment)) or "the experiment as it is"
            console.print(f"\nBest layout: {options}", soft_wrap=True, markup=False)
            asked = assessment.assumptions
            best = assess(found.found[0].experiment, assessment.slots, assessment.source, asked)
            days = days_line(best) if asked.tokens or asked.cost_per_gpu_hour else None
            for line in filter(None, (days, goodput_line(best))):
                console.print(line, soft_wrap=True)
        else:
            print(none, file=sys.stderr)
    return 0 if found.found else RequestError.exit_code


def as_options(changes: Sequence[str]) -> str:
    """Returns overrides as the ``--set`` options of a command line."""
    return shlex.join(word for change in changes for word in ("--set", change))


def _document(found: Search, assessment: Assessment, problems: Sequence[Problem]) -> dict[str, Any]:
    front, asked = {id(one) for one in found.pareto_front}, assessment.assumptions
    each, correction = asked.cost_per_gpu_hour, asked.correction
    return {
        "found": [
            {
                "fields": dict(one.choice),
                "set": overrides_of(one, assessment.experiment),
                "data_parallel_size": one.data_parallel_size,
                "verdict": one.worst.fit,
                "total_gib": round(one.worst.total_bytes / GIB, 4),
                "least_gib": round(one.worst.least_bytes / GIB, 4),
                "pareto": id(one) in front,
                "seconds": one.seconds,
                "seconds_range": one.estimate.seconds_range,
                "tokens_per_second": one.estimate.tokens_per_second,
                "mfu": one.estimate.mfu,
                "gpu_hours": one.gpu_hours(asked.tokens),
                "cost": None if each is None else each * one.gpu_hours(asked.tokens),
            }
            for one in found.found
        ],
        "network": found.rates.network_source,
        **({} if correction is None else {"from_run": correction.document()}),
        "rejected": [{"fields": dict(one.choice), "reason": one.reason} for one in found.rejected],
        "problems": [problem.document for problem in problems],
    }


_MOST_TERMS = 5
_MOST_COLUMNS = 4
_MOST_LAYOUTS = 12
_MOST_REASONS = 8


def headline(assessment: Assessment) -> Text:
    """Returns one line: verdict, layout, memory of the highest rank, step time."""
    return Text(" · ").join([_verdict(assessment), *(Text(text) for _, text in _figures(assessment))])


def _verdict(assessment: Assessment) -> Text:
    """Returns the verdict, the layout and its size."""
    plan, text = assessment.plan, Text()
    if plan is None:
        return text.append(LABELS["illegal"], STYLES["illegal"])
    judged = assessment.assumptions.gpu is not None and assessment.worst is not None
    text.append(LABELS[assessment.verdict] if judged else "can run", STYLES[assessment.verdict])
    return text.append(f" · {plan.layout} · {count(plan.world_size, 'rank')}")


def _figures(assessment: Assessment) -> Iterator[tuple[str, str]]:
    """Yields the memory of the highest rank and the step time, as far as they are known."""
    gpu, worst = assessment.assumptions.gpu, assessment.worst
    if worst is not None:
        of = "" if gpu is None else f" of {gpu.memory_bytes / GIB:.1f} ({gpu.name})"
        yield "memory", f"{interval(worst)} per rank{of}"
    if assessment.cost is not None and (found := assessment.cost.estimate) is not None:
        yield "time", f"about {seconds(found.iteration, found.seconds_range)} per iteration"


def summary(assessment: Assessment) -> Group:
    """Returns the plan without its cost."""
    return Group(*_summary(assessment), "", RankMap(assessment.laid_out, captions(assessment)))


def _summary(assessment: Assessment) -> Iterator[RenderableType]:
    yield from (_verdict(assessment), _facts(assessment))
    if assessment.memory:
        yield from ("", memory_table(assessment))


def render(assessment: Assessment) -> Group:
    """Returns the whole plan as tables."""
    assert assessment.cost is not None
    parts = [*_summary(assessment), "", _cost_table(assessment.cost, assessment.experiment)]
    parts += ["", RankMap(assessment.laid_out, captions(assessment))]
    if (correction := assessment.assumptions.correction) is not None:
        parts += ["", correction_table(correction)]
    parts += [Text(f"warning: {warning}", "dark_orange3") for warning in assessment.warnings]
    parts += [Text(f"note: {note}", "dim") for note in assessment.notes]
    parts.append("--why explains each term and lists the traffic; --plot FILE draws every rank")
    return Group(*parts, *filter(None, (days_line(assessment), goodput_line(assessment))))


def captions(assessment: Assessment) -> dict[int, str]:
    """Returns the text of each stage in the legend of the rank map."""
    judged = assessment.assumptions.gpu is not None
    return {stage.stage: interval(stage) + (f", {LABELS[stage.fit]}" if judged else "") for stage in assessment.memory}


def _facts(assessment: Assessment) -> Table:
    plan, cost, experiment = assessment.plan, assessment.cost, assessment.experiment
    assert plan is not None
    assert cost is not None
    replicas, steps = count(plan.data_parallel_size, "replica"), count(plan.accumulation_steps, "step")
    samples, tokens = count(plan.global_batch_size, "sample"), f"{plan.tokens_per_step:,} {experiment.model.unit}"
    batch = f"{plan.micro_batch_size} x {replicas} x {steps} = {samples}, {tokens}"
    parameters = count(cost.parameters, "parameter")
    rows = (
        *_figures(assessment),
        ("experiment", f"{experiment.name}, engine {experiment.engine}, {experiment.precision}, {parameters}"),
        ("micro batch", batch),
        *(() if cost.active == cost.parameters else (("active a token", f"{cost.active:,}"),)),
        ("hang limit", described(experiment.launch.hang_timeout, assessment.seconds)),
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
    table = headed_table(f"Memory per rank in GiB{of}", ["", *(f"stage {stage.stage}" for stage in stages)])
    for name in _names(assessment.memory):
        amounts = [next((term.bytes for term in stage.terms if term.name == name), 0) for stage in stages]
        table.add_row(name, *(gib(amount) for amount in amounts))
    table.add_section()
    table.add_row(Text("total", "bold"), *(Text(gib(stage.total_bytes), "bold") for stage in stages))
    table.add_row("nine of ten runs stay below", *(gib(stage.most_bytes) for stage in stages), style="dim")
    if gpu is not None:
        table.add_row("at least", *(gib(stage.least_bytes) for stage in stages), style="dim")
        shares = [Text(f"{stage.share:.0%} {stage.fit.removesuffix('-fit')}", STYLES[stage.fit]) for stage in stages]
        table.add_row("share of GPU", *shares)
    for name, amounts in (
        ("offloaded, to the host", [stage.offloaded_bytes for stage in stages]),
        ("offloaded, to NVMe", [stage.nvme_bytes for stage in stages]),
        ("checkpoint copy, on the host", [stage.copied_bytes for stage in stages]),
    ):
        if any(amounts):
            table.add_row(name, *map(gib, amounts), style="dim")
    if host := max(assessment.host_memory.values(), key=lambda it: it.most, default=None):
        table.caption = str(host)
    table.add_row("layers", *(str(stage.layers) for stage in stages), style="dim")
    table.add_row("parameters", *(count_short(stage.parameters.total) for stage in stages), style="dim")
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


def sources(assessment: Assessment) -> Text:
    """Returns each term's meaning and the source of its formula."""
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


def _cost_table(cost: Cost, experiment: Experiment) -> Table:
    model = experiment.model
    causal = "" if model.is_vision else f" ({flops(cost.causal_flops)} with causal attention as half)"
    rows = [
        ("model FLOPs", f"{flops(cost.model_flops)}{causal}"),
        ("hardware FLOPs", f"{flops(cost.hardware_flops)} with recomputation"),
        ("pipeline bubble", f"{cost.bubble:.1%} of the time"),
        *_estimated(cost, experiment),
    ]
    table = _pairs(rows)
    table.title, table.title_justify, table.title_style = "Cost of an iteration", "left", "bold"
    return table


def _estimated(cost: Cost, experiment: Experiment) -> Iterator[tuple[str, str]]:
    estimate, rates, model = cost.estimate, cost.rates, experiment.model
    if estimate is None:
        why = "the GPU is unknown (--gpu)"
        if ENGINES[experiment.engine].cost_model is None:
            why = f"engine {experiment.engine} has no cost model"
        elif model.is_vision:
            why = "the GPU's rate for convolutions is unknown (--tflops)"
        yield "time", f"not estimated: {why}"
        return
    terms = sorted(estimate.terms.items(), key=lambda term: -abs(term[1]))
    shares = [f"{name} {seconds(value)}" for name, value in terms if abs(value) >= 0.0005]
    yield "time", ", ".join([*shares[:_MOST_TERMS], *(["…"] if len(shares) > _MOST_TERMS else [])])
    if rates.spread is not None:
        yield "range", str(rates.spread)
    network = "assumed" if rates.network_source.startswith("assumed") else rates.network_source  # a note has how
    yield (
        "rates",
        f"{rates.tflops or 0:,.0f} TFLOP/s per GPU ({rates.tflops_source}), {rates.network_gb_s * 8:g} Gbit/s per node"
        f" ({network})",
    )
    per_day = count_short(estimate.tokens_per_second * 86400)
    around = "" if estimate.speeds is None else " ({:,.0f} to {:,.0f})".format(*estimate.speeds)
    yield "speed", f"about {estimate.tokens_per_second:,.0f} {model.unit}/s{around}, {per_day} {model.unit} per day"
    if estimate.mfu is not None:
        yield "MFU", f"about {estimate.mfu:.0%}"


def traffic_table(cost: Cost) -> Table:
    columns = ("group", "ranks", "link", "GiB", "seconds")
    table = headed_table("Traffic per rank and iteration", columns, left=("group", "link"))
    for one in cost.traffic:
        seconds = "-" if cost.estimate is None else f"{cost.rates.seconds(one):.3f}"
        link = "between nodes" if one.link == "network" else "within a node"
        table.add_row(one.group, str(one.size), link, f"{one.bytes_per_rank / GIB:.3f}", seconds)
    return table


def correction_table(correction: Correction) -> Table:
    """Returns a run's planned and measured figures side by side, and the factors that this plan applies."""
    table = headed_table(f"Corrected by {correction.source}", ("", "its plan", "measured", "factor"))
    for row in correction_rows(correction):
        table.add_row(*row)
    table.caption, table.caption_justify = f"over {count(correction.iterations, 'logged iteration')}", "left"
    return table


def render_search(found: Search, name: str) -> Group:
    """Returns the layouts that a search found, as tables."""
    table = _candidates(f"Layouts of {name}, best first", found.found, found.found)
    legend = (
        "mb: micro batch; states: ZeRO stage, distributed optimizer, reduce_gradients_once; recompute: full, selective"
    )
    if any(Offload.of(one.experiment).label for one in found.found):
        legend += "\nnothing fits without offloading to the host: o, optimizer states; op, weights too"
    parts: list[RenderableType] = [table, Text(legend, "dim")]
    rates = found.rates
    parts.append(f"network: {rates.network_gb_s * 8:g} Gbit/s per node ({rates.network_source})")
    if (spread := rates.spread) is not None:
        ends = f"{spread.low / spread.typical:.2f} to {spread.high / spread.typical:.2f}"
        parts.append(f"each time has a range of {ends} times it, as of {spread.runs:,} published runs")
    if any(one.experiment.model.num_moe_experts for one in found.found):
        parts.append("the order of layouts with experts is not reliable: published ones came in another")
    omitted = len(found.found) - _MOST_LAYOUTS
    if omitted > 0:
        parts.append(f"and {count(omitted, 'more layout')} that fit{'s' if omitted == 1 else ''}")
    if len(front := found.pareto_front) > 1:
        parts += ["", _candidates("Memory against time: no other layout is faster with less", front, found.found)]
        if len(front) > _MOST_LAYOUTS:
            parts.append(f"and {len(front) - _MOST_LAYOUTS} more with less memory (--json)")
    if found.rejected:
        parts += ["", Text(f"{len(found.rejected):,} others do not work:", "bold")]
        counted = count_reasons(found.rejected)
        parts += [f"{number:>6,}  {reason}" for reason, number in counted[:_MOST_REASONS]]
        rest = sum(number for _, number in counted[_MOST_REASONS:])
        if rest:
            parts.append(f"{rest:>6,}  for other reasons (--json lists all)")
    return Group(*parts)


def _candidates(title: str, shown: Sequence[Candidate], found: Sequence[Candidate]) -> Table:
    """Returns the first rows of ``shown``, each with its number among all that were ``found``."""
    table = headed_table(title)
    table.padding = (0, 1, 0, 0)
    unit = next((one.experiment.model.unit for one in shown), "tokens")
    for column in ("", "layout", "mb", "states", "recompute", "GiB", "GPU", "time", f"{unit}/s", "MFU"):
        left = column in ("layout", "states", "recompute")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "layout")
    numbers = {id(one): number for number, one in enumerate(found, start=1)}
    for one in shown[:_MOST_LAYOUTS]:
        table.add_row(str(numbers[id(one)]), *_candidate_row(one))
    return table


def _candidate_row(one: Candidate) -> Iterator[str | Text]:
    parallel, model = one.experiment.parallel, one.experiment.model
    yield layout_label(parallel, one.data_parallel_size) + (" SP" if parallel.sequence_parallel else "")
    yield str(one.experiment.batch.micro_batch_size)
    yield states_of(one.experiment)
    full = model.checkpoint_activations or model.recompute_granularity == "full"
    yield "full" if full else "sel" if model.recompute_granularity else ""
    yield f"{one.worst.total_bytes / GIB:.1f}"
    yield Text(f"{one.worst.share or 0:.0%}", STYLES[one.worst.fit])
    yield seconds(one.seconds)
    yield f"{one.estimate.tokens_per_second:,.0f}"
    yield "-" if one.estimate.mfu is None else f"{one.estimate.mfu:.0%}"
