"""The errors of plans by class, of the published tables as a user has them: ``tridock/plan/spreads.yaml``.

Each publication has the same weight in a class, however many rows it has; all rows together count as two more, so that
a class of few publications is not narrower than what others tell. A range lies between the percentiles 2.5 and 97.5 of
measured over planned; of rows whose own publication did not help to set it, it holds for fewer.

Memory has too few publications for percentiles. Its upper end is what a further publication's 90th percentile stays
below with 90 % probability, if the logarithms of theirs are distributed normally (a prediction interval).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from tests.planner.compare import Compared, as_user, compared, tables
from tridock.gpus import GPUS
from tridock.plan.spread import MANY, PATH, RunClass, Spread

TAILS = (0.025, 0.5, 0.975)
OTHERS = 2
"""Publications as which the rows of all other classes count."""
STUDENT = {2: 3.078, 3: 1.886, 4: 1.638, 5: 1.533, 6: 1.476, 7: 1.440, 8: 1.415}
"""Student's t, 90 % one-sided, by the number of publications."""
UNKNOWN = {"matmul_share": 0.78, "attention_share": 0.55, "flash_2_share": None, "half_length": 512}
"""The shares of a GPU on which nothing was measured: Ampere's."""
DOCUMENT = Path(__file__).parents[2] / "docs/planner.md"
BEGIN, END = "<!-- errors by class: written by make bench-planner -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Row:
    run_class: RunClass
    source: str
    table: str
    compared: Compared

    @property
    def time(self) -> float:
        return self.compared.measured / self.compared.predicted

    @property
    def memory(self) -> float | None:
        memory = self.compared.memory
        return None if memory.measured is None else memory.measured / memory.planned


def source_of(table: Mapping[str, Any]) -> str:
    """The publication of a table: those of one project are one."""
    return str(table["name"]).partition("-")[0]


Kind = Literal["measured", "not measured", "described"]


@cache
def rows(kind: Kind = "measured") -> tuple[Row, ...]:
    """Every row as a user has it; as if nothing had been measured on its GPU; or of a described program with its
    name."""
    found = []
    for table in tables():
        described = kind == "described"
        if described and "program" not in table:
            continue
        wanted = as_user(table, program=described)
        if kind == "not measured":
            wanted["kernels"] = UNKNOWN
        fields = table["fields"]
        for one in compared(wanted):
            experts = "model.num_moe_experts" in fields
            many = one.gpus > MANY and not experts
            run_class = RunClass(fields["engine"], experts, many, kind != "not measured", described)
            if not described and "user_memory_unknown" in table:
                one = replace(one, memory=replace(one.memory, measured=None))
            found.append(Row(run_class, source_of(table), table["name"], one))
    return tuple(found)


def timed(of: Iterable[Row]) -> list[Row]:
    return [row for row in of if not math.isnan(row.compared.measured)]


def weighted(of: Sequence[Row], total: float | None = None) -> list[tuple[float, float]]:
    """Measured over planned times with their weights: one for each publication, or ``total`` for all."""
    count = Counter(row.source for row in of)
    share = 1.0 if total is None else total / len(count) if count else 0.0
    return [(row.time, share / count[row.source]) for row in of]


def quantile(values: Sequence[tuple[float, float]], at: float) -> float:
    reached, total = 0.0, sum(weight for _, weight in values)
    for value, weight in sorted(values):
        reached += weight
        if reached >= at * total - 1e-12:
            return value
    raise ValueError("no values")


def spread_of(run_class: RunClass, of: Sequence[Row]) -> Spread:
    own = [row for row in of if row.run_class == run_class]
    values = weighted(own) + weighted(of, OTHERS)
    low, typical, high = (quantile(values, at) for at in TAILS)
    return Spread(len(own), len({row.source for row in own}), *(round(it, 3) for it in (low, typical, high)))


def time_spreads() -> dict[RunClass, Spread]:
    found = {}
    for kind in get_args(Kind):
        every = timed(rows(kind))
        found |= {it: spread_of(it, every) for it in sorted({row.run_class for row in every}, key=str)}
    return found


def corrected() -> Spread:
    """Of each row, planned with the correction of each other one of its table."""
    of_table: dict[str, list[Row]] = defaultdict(list)
    for row in timed(rows()):
        of_table[row.table].append(row)
    pairs = [
        (one.source, one.time / other.time) for of in of_table.values() for one in of for other in of if one != other
    ]
    count = Counter(source for source, _ in pairs)
    values = [(ratio, 1 / count[source]) for source, ratio in pairs]
    runs = sum(len(of) for of in of_table.values() if len(of) > 1)
    return Spread(runs, len(count), round(quantile(values, TAILS[0]), 3), 1.0, round(quantile(values, TAILS[2]), 3))


def memory(of: Sequence[Row]) -> Spread:
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in of:
        if row.memory is not None:
            ratios[row.source].append(row.memory)
    tops = [math.log(quantile([(it, 1) for it in ratio], 0.9)) for ratio in ratios.values()]
    beyond = STUDENT[len(tops)] * statistics.stdev(tops) * math.sqrt(1 + 1 / len(tops))
    every = [(it, 1 / len(ratio)) for ratio in ratios.values() for it in ratio]
    high = max(1.0, math.exp(statistics.mean(tops) + beyond))
    low, typical = (round(quantile(every, at), 3) for at in TAILS[:2])
    return Spread(sum(map(len, ratios.values())), len(tops), low, typical, round(high, 3))


def document() -> dict[str, Any]:
    """What ``spreads.yaml`` holds."""
    gpus = {GPUS[table["gpu"]].kernels: table["gpu"] for table in tables() if "time_unknown" not in table}
    return {
        "gpus": sorted(gpus.values()),
        "times": [asdict(run_class) | asdict(spread) for run_class, spread in time_spreads().items()],
        "corrected": asdict(corrected()),
        "memory": asdict(memory(rows())),
        "memory described": asdict(memory(rows("described"))),
    }


@cache
def spread_without(run_class: RunClass, source: str) -> Spread:
    """The spread of a class that a publication did not help to set."""
    kind: Kind = "described" if run_class.described else "measured"
    return spread_of(run_class, [row for row in timed(rows(kind)) if row.source != source])


def time_holds(row: Row) -> bool:
    spread = spread_without(row.run_class, row.source)
    return spread.low <= row.time <= spread.high


def typical_error(row: Row) -> float:
    """The error of the row's estimate, whose median its own publication did not help to set."""
    return spread_without(row.run_class, row.source).typical / row.time - 1


def of_memory() -> list[Row]:
    return [row for row in rows() if row.memory is not None]


@cache
def memory_without(source: str) -> Spread:
    return memory([row for row in rows() if row.source != source])


def memory_holds(row: Row) -> bool:
    assert row.memory is not None
    return row.memory <= memory_without(row.source).high


def name_of(run_class: RunClass) -> str:
    if run_class.experts:
        return f"`{run_class.engine}`, experts"
    return f"`{run_class.engine}`, dense, {'more than' if run_class.many else 'up to'} {MANY} GPUs"


def figures(name: str, of: Sequence[Row], spread: Spread | None = None) -> str:
    """One row of the documentation's table."""
    between = "" if spread is None else f"{spread.low:.2f} to {spread.high:.2f}, {spread.typical:.2f}"
    plain = statistics.median(row.compared.error for row in of)
    error = statistics.median(abs(typical_error(row)) for row in of)
    held = statistics.mean(map(time_holds, of))
    cells = (
        str(len(of)),
        str(len({row.source for row in of})),
        f"{plain:+.0%}",
        between,
        f"{error:.0%}",
        f"{held:.0%}",
    )
    return f"| {' | '.join((name, *cells))} |"


def documented() -> str:
    """The tables of errors by class, for the documentation."""
    spreads, text = time_spreads(), ""
    for kind, title in (("measured", "as a user has it"), ("described", "with its program named")):
        every = timed(rows("described" if kind == "described" else "measured"))
        dense = [row for row in every if not (row.run_class.experts or row.run_class.many)]
        classes = [it for it in spreads if it.measured and it.described == (kind == "described")]
        lines = [
            f"| {title} | runs | publications | terms alone | measured / terms: range, median | error | range holds |",
            "|---|---|---|---|---|---|---|",
            *(figures(name_of(it), [row for row in every if row.run_class == it], spreads[it]) for it in classes),
            figures(f"all dense, up to {MANY} GPUs", dense),
            figures("all", every),
        ]
        text += "\n".join(lines) + "\n\n"
    return text


def as_text() -> str:
    """The text of ``spreads.yaml``."""
    found = document()
    lines = ["# How far runs lie from their plans (tridock/plan/spread.py): written by `make bench-planner`.", ""]
    for key, value in found.items():
        if key == "times":
            lines += ["times:", *(f"- {json.dumps(one)}" for one in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    PATH.write_text(as_text())
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + documented() + END + rest.partition(END)[2])
    held = statistics.mean(map(memory_holds, of_memory()))
    print(documented())
    print(f"memory: {memory(rows())}; the upper end holds for {held:.0%}")
    refused = sum(row.compared.memory.verdict == "no-fit" for row in rows())
    print(f"{refused} of {len(rows())} rows are called no-fit without settings")
    print(f"written: {PATH}, {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
