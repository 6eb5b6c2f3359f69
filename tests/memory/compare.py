"""What the planner predicts of a rank's memory beside what was measured (``make bench-memory``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.experiments import make_plan
from tests.memory.cases import Case, experiment
from tridock.experiment import Experiment
from tridock.layout.shape import LayoutShape
from tridock.plan.memory import StageMemory, memory_of_stage

MEASURED = Path(__file__).parents[1] / "data" / "memory-cpu.json"
DEMO_TOKENS = 500
"""Of the tokenizer that the cases of Megatron v1.1.5 were measured with: theirs is the data's."""
STATES = ("weights", "gradients", "optimizer states")


@dataclass(frozen=True)
class Compared:
    """One figure of one rank."""

    case: str
    stage: int
    what: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Relative; where nothing was measured, 0 if nothing was predicted."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1


@cache
def measured() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(MEASURED.read_text())
    return document


def planned(record: Mapping[str, Any]) -> Experiment:
    """The experiment of a case, with the vocabulary that it had."""
    whole = experiment(Case(record["engine"], record["world_size"], record["fields"]))
    if whole.model.vocab_size is not None:
        return whole
    return whole.model_copy(update={"model": whole.model.model_copy(update={"vocab_size": DEMO_TOKENS})})


def compare(name: str) -> Iterator[Compared]:
    """Every figure of a case, on the first rank of each stage."""
    record = measured()["cases"][name]
    whole = planned(record)
    plan = make_plan(whole, {"node": range(record["world_size"])}, name)
    shape = LayoutShape(plan.data_parallel_size, plan.accumulation_steps, record["world_size"])
    seen: set[int] = set()
    for rank in record["ranks"]:
        stage = rank["pipeline_parallel_rank"]
        if stage not in seen:
            seen.add(stage)
            yield from _figures(name, memory_of_stage(whole, stage, shape, None), rank)


def _figures(name: str, memory: StageMemory, rank: Mapping[str, Any]) -> Iterator[Compared]:
    terms = {term.name: term.bytes for term in memory.terms}
    # A hidden state's gradient that a pipeline still holds is no weight's; ZeRO 3 keeps its bucket between steps.
    bucket = sum(size for key, size in rank["gradients"].items() if "ipg_buckets" in key)
    gradients = sum(size for key, size in rank["gradients"].items() if not _is_hidden(key)) - bucket
    persistent = (rank["parameters"]["bytes"], gradients, sum(rank["optimizer"].values()))
    yield Compared(name, memory.stage, "parameters", memory.parameters.total, rank["parameters"]["elements"])
    for what, value in zip(STATES, persistent, strict=True):
        yield Compared(name, memory.stage, what, terms.get(what, 0), value)
    temporary = memory.total_bytes - sum(terms.get(what, 0) for what in STATES)
    # What the pipelines of torch and DeepSpeed keep between steps, their buffers, is a part of the step in the plan.
    buffers = rank["live_before_step"] - persistent[0] - sum(rank["gradients"].values()) - persistent[2]
    seen = rank["step_peak"] + bucket + (0 if name.startswith("megatron-core-") else buffers)
    yield Compared(name, memory.stage, "step", temporary, seen)


def _is_hidden(key: str) -> bool:
    return "input_tensor" in key or "grad_layer" in key


def main() -> None:
    """Prints the table; arguments choose cases that contain them."""
    console = Console(highlight=False)
    document = measured()
    console.print(f"measured on {json.dumps(document['measured_on'])}", soft_wrap=True)
    table = Table("case", "stage", "what", "predicted", "measured", "error")
    worst: dict[str, float] = {}
    for name in document["cases"]:
        if all(word in name for word in sys.argv[1:]):
            for one in compare(name):
                table.add_row(
                    name, str(one.stage), one.what, f"{one.predicted:,}", f"{one.measured:,}", f"{one.error:+.2%}"
                )
                worst[one.what] = max(worst.get(one.what, 0.0), abs(one.error))
    console.print(table)
    console.print("largest error: " + ", ".join(f"{what} {error:.2%}" for what, error in worst.items()))


if __name__ == "__main__":
    main()
