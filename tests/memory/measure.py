"""`make measure-memory`: what CPU ranks hold, for the planner's memory model to agree with.

Writes tests/data/memory-cpu.json. Each case (see ``cases.py``) trains on real ranks, whose operations are watched.
``--details CASE`` prints instead which tensors a case saves for the backward pass, and which live at its peak. Engine
megatron-deepspeed needs TRIDOCK_MEGATRON, as its tests do.

A rank's record, in bytes of whole storages, each counted once however many views there are:

- ``parameters``: elements and bytes of this rank's model; a weight that two modules share, once;
- ``gradients``, ``optimizer``, ``other``: what lives between two iterations, after the first, by name: gradients and
  their buffers; master weights and Adam's moments; what is neither;
- ``saved_peak``: the peak of what the graph kept for the backward pass in the second iteration, without
  parameters and what lives between iterations; ``saved_at_first_backward``: as the step's first backward pass began;
- ``live_before_step``: what lives between iterations, all together; ``step_peak``: the most that operations had
  allocated above that at any moment of the third iteration, without what lives inside one kernel only.

What checkpointing without reentrance computes again is in ``step_peak`` only. A GPU differs where its kernels do: a
dropout mask has one byte an element there (here as many as the activation), attention with dropout is fused (here it
saves all its weights), a norm's statistics are fp32 (here of the activation's format), and pipelines of megatron-core
free a stage's output once it is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.distributed.ranks import free_port, place
from tests.experiments import make_plan
from tests.megatron_source import REMEDY, patched_source
from tests.memory import rank
from tests.memory.cases import BASE, CASES, Case, experiment
from tests.memory.children import Child, answers, only_answer
from tridock.contracts import environment
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.experiment import dump_experiment, load_experiment
from tridock.plan import Plan

RESULT = Path(__file__).parents[1] / "data/memory-cpu.json"
MOST_RANKS = 4


def main() -> None:
    """Measures the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", default=["*"], metavar="PATTERN", help="of cases; others keep their figures"
    )
    parser.add_argument("--details", metavar="CASE", choices=CASES, help="print what a case holds; write nothing")
    arguments = parser.parse_args()
    patterns = [arguments.details] if arguments.details else arguments.cases
    chosen = {name: case for name, case in CASES.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    engines = [engine for engine in BASE if any(case.engine == engine for case in chosen.values())]
    if "megatron-deepspeed" in engines and environment.MEGATRON not in os.environ:
        parser.error(f"the source of Megatron-LM v1.1.5 is not at hand; {REMEDY}")
    os.environ.update({"OMP_NUM_THREADS": "1", "DEEPSPEED_TIMEOUT": "5"})  # minutes
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        prepare_demo(workspace / "data/demo", vocab_size=500, report=lambda _: None, corpus_bytes=1_000_000)
        if arguments.details:
            print(only_answer(lambda: details(workspace, arguments.details, CASES[arguments.details])))
            return
        for engine in engines:
            own = {name: case for name, case in chosen.items() if case.engine == engine}
            only_answer(partial(measured, workspace, engine, own))


def write(measured_now: Mapping[str, Any]) -> None:
    """The file, with one line a rank, in the order of the grid; what is not measured now stays as it was."""
    cases = (json.loads(RESULT.read_text())["cases"] if RESULT.is_file() else {}) | measured_now
    cases = {name: cases[name] for name in CASES if name in cases}
    packages = {name: version(name) for name in ("torch", "deepspeed", "megatron-core")}
    on = {"machine": platform.machine(), "device": "cpu", "date": datetime.now(UTC).date().isoformat(), **packages}
    head = {"about": __doc__.split("\n\n", 1)[1].rstrip(), "measured_on": on, "base": BASE}
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "cases": {']
    for number, (name, case) in enumerate(cases.items()):
        ranks = ",\n".join(f"   {json.dumps(found)}" for found in case["ranks"])
        start = {key: value for key, value in case.items() if key != "ranks"}
        body = f'  {json.dumps(name)}: {json.dumps(start)[:-1]}, "ranks": [\n{ranks}]}}'
        lines.append(body + ("," if number + 1 < len(cases) else "\n }\n}"))
    RESULT.write_text("\n".join(lines) + "\n")


def measured(workspace: Path, engine: str, chosen: Mapping[str, Case]) -> str:
    """Measures cases of an engine. In a process of its own: what engines put in place of torch's parts stays."""
    source = _prepare(workspace, engine)
    for name, case in chosen.items():
        began = time.monotonic()
        found, plan = run(workspace, name, case, source), _plan(name, case)
        keys = ("rank", "data_parallel_rank", "pipeline_parallel_rank", "tensor_parallel_rank", "context_parallel_rank")
        places = [{key: getattr(here, key) for key in keys} for here in plan.ranks]
        ranks = [where | own["result"] for where, own in zip(places, found, strict=True)]
        whole = {"engine": engine, "world_size": case.world_size, "fields": dict(case.fields), "ranks": ranks}
        write({name: whole})
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return f"{len(chosen)} cases"


def details(workspace: Path, name: str, case: Case) -> str:
    """What each rank of a case saves, in the order of the forward pass, and what lives at its peak."""
    found = run(workspace, name, case, _prepare(workspace, case.engine))
    text = [f"{name}: {json.dumps(dict(case.fields))} over {json.dumps(BASE[case.engine])}"]
    for number, own in enumerate(found):
        text += [f"rank {number}: {json.dumps(own['result'])}", "saved: count x module | storage | shape, format"]
        text += [*own["saved"], "at the peak: bytes | made by", *own["at_peak"]]
    return "\n".join(text)


def _prepare(workspace: Path, engine: str) -> Path | None:
    rank.prepare(engine, MOST_RANKS)
    return patched_source(workspace / "megatron") if engine == "megatron-deepspeed" else None


def _plan(name: str, case: Case) -> Plan:
    return make_plan(experiment(case), {"localhost": range(case.world_size)}, name)


def run(workspace: Path, name: str, case: Case, source: Path | None) -> list[dict[str, Any]]:
    """Forks the ranks of a case; gives what each found."""
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    plan = _plan(name, case)
    resolved = experiment(case).resolved(plan.data_parallel_size)
    program = rank_program(resolved, plan, name, str(folder))
    (folder / "experiment.yaml").write_text(dump_experiment(resolved))
    for file, content in program.files.items():
        (folder / file).write_bytes(content)
    port = free_port()

    def one(number: int) -> str:
        os.environ.update(place(number, case.world_size, port) | dict(program.env))
        if source is None:
            measure = rank.train(load_experiment(folder / "experiment.yaml"), folder)
        else:
            os.environ[environment.MEGATRON] = str(source)
            measure = rank.train_megatron(list(program.arguments))
        return json.dumps({"result": measure.result, "saved": measure.saved, "at_peak": measure.at_peak})

    started = [
        Child.fork(lambda number=number: one(number), folder / f"rank-{number}", keep_output=True)
        for number in range(case.world_size)
    ]
    return [json.loads(text) for text in answers(started)]


if __name__ == "__main__":
    main()
