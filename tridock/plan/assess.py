"""The verdict on an experiment and a cluster: every reason why it cannot run, or its plan, memory and cost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.groups import make_groups, warnings
from tridock.layout.plan import Plan, lay_out
from tridock.layout.shape import GPT2_TOKENS, Shape
from tridock.plan.cost import Cost, Rates, cost_of
from tridock.plan.legality import layout_problems
from tridock.plan.memory import GIB, StageMemory, memory_of_stages

Verdict = Literal["fits", "tight", "no-fit", "illegal"]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the plan assumes beside the experiment and the hostfile. None: not known."""

    gpu: Gpu | None = None
    network_gbit: float | None = None
    """Between nodes, of one node."""
    tflops: float | None = None
    """Of one GPU while it computes, measured or wished for."""
    tokens: float | None = None
    """How many the model is to see in all; the run's own where left out."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """What is known of a run before it starts."""

    experiment: Experiment
    source: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    assumptions: Assumptions
    plan: Plan | None = None
    """None where the experiment is illegal; so are the next two empty."""
    memory: tuple[StageMemory, ...] = ()
    cost: Cost | None = None
    warnings: tuple[str, ...] = ()
    """What would make the run slow: groups that cross nodes and need not."""

    @property
    def verdict(self) -> Verdict:
        """``fits`` where the GPU is not known: nothing speaks against the run."""
        if self.problems:
            return "illegal"
        fits = [stage.fit for stage in self.memory]
        return "no-fit" if "no-fit" in fits else "tight" if "tight" in fits else "fits"

    @property
    def worst(self) -> StageMemory:
        """The stage that needs the most memory."""
        return max(self.memory, key=lambda stage: stage.total_bytes)

    @property
    def laid_out(self) -> Plan:
        """The plan of an experiment that is legal."""
        assert self.plan is not None
        return self.plan

    def checked(self, *, force: bool = False) -> Plan:
        """The plan. Raises :class:`RequestError` with every reason against the run: it is illegal, or does not fit.

        ``force`` lets one pass that does not fit.
        """
        problems = [replace(problem, where=f"{self.source}: {problem.where}") for problem in self.problems]
        gpu = self.assumptions.gpu
        if self.verdict == "no-fit" and gpu is not None and not force:
            worst = self.worst
            todo = "see `tridock plan --search` for layouts that fit, or start it all the same with --force"
            has = f"{gpu.memory_mib / 1024:.1f} GiB"
            what = f"a rank of stage {worst.stage} needs more memory than the {has} of a {gpu.name}"
            problems.append(Problem(self.source, what, f"{worst.total_bytes / GIB:.1f} GiB", todo))
        if problems:
            raise RequestError(problems)
        return self.laid_out

    def document(self) -> dict[str, Any]:
        """What ``--json`` prints and ``plan.json`` holds."""
        plan = {} if self.plan is None else self.plan.document()
        return {
            "verdict": self.verdict,
            "problems": [
                {"field": problem.where, "message": str(problem), "nearest": list(problem.nearest)}
                for problem in self.problems
            ],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            **plan,
            "ranks": plan.get("ranks", []),
            "groups": {} if self.plan is None else _groups(self.plan),
            "memory": self._memory(),
            "cost": None if self.cost is None else self._cost(self.cost),
        }

    def to_json(self) -> str:
        return json.dumps(self.document(), indent=2) + "\n"

    def _memory(self) -> dict[str, Any]:
        gpu = self.assumptions.gpu
        return {
            "gpu": None if gpu is None else gpu.name,
            "limit_gib": None if gpu is None else round(gpu.memory_bytes / GIB, 3),
            "stages": [
                {
                    "stage": stage.stage,
                    "layers": stage.layers,
                    "parameters": stage.parameters.total,
                    "terms": [
                        {
                            "name": term.name,
                            "bytes": term.bytes,
                            "gib": round(term.bytes / GIB, 4),
                            "source": term.source,
                        }
                        for term in stage.terms
                    ],
                    "startup_bytes": stage.startup_bytes,
                    "checkpoint_copy_bytes": stage.copied_bytes,
                    "total_bytes": stage.total_bytes,
                    "total_gib": round(stage.total_bytes / GIB, 4),
                    "share": None if stage.share is None else round(stage.share, 4),
                    "verdict": stage.fit,
                }
                for stage in self.memory
            ],
        }

    def _cost(self, cost: Cost) -> dict[str, Any]:
        estimate = None
        if cost.estimate is not None:
            tokens = self.tokens
            estimate = {
                **asdict(cost.estimate),
                "iteration": cost.estimate.iteration,
                "tokens_per_day": cost.estimate.tokens_per_second * 86400,
                "tokens": tokens,
                "days": cost.days(tokens),
            }
        return {**asdict(cost), "estimate": estimate}

    @property
    def tokens(self) -> float:
        """The tokens that the cost is for."""
        if self.assumptions.tokens is not None:
            return self.assumptions.tokens
        return float(self.experiment.train.train_iters * (self.cost.tokens if self.cost is not None else 0))


def assess(
    experiment: Experiment,
    slots: Mapping[str, Sequence[int]],
    source: str,
    assumptions: Assumptions = Assumptions(),
) -> Assessment:
    """Weighs the experiment on ``slots`` (node to slot numbers, in the hostfile's order). Contacts nothing.

    ``source`` (the experiment's file) begins the messages of :meth:`Assessment.checked`.
    """
    world_size = sum(len(numbers) for numbers in slots.values())
    problems = [*layout_problems(experiment, world_size), *gpu_problems(experiment, assumptions.gpu)]
    if problems:
        return Assessment(experiment, source, tuple(problems), (), assumptions)
    notes = tuple(_notes(experiment, assumptions))
    plan = lay_out(experiment, slots)
    shape = Shape(plan.data_parallel_size, plan.accumulation_steps, min(len(numbers) for numbers in slots.values()))
    memory = memory_of_stages(experiment, shape, assumptions.gpu)
    rates = Rates.of(
        assumptions.gpu, experiment.precision, assumptions.tflops, assumptions.network_gbit, experiment.train.tf32
    )
    cost = cost_of(experiment, shape, max(stage.state_bytes for stage in memory), rates)
    return Assessment(experiment, source, (), notes, assumptions, plan, memory, cost, tuple(warnings(plan)))


def _groups(plan: Plan) -> dict[str, dict[str, int]]:
    """Of each kind: how many groups there are, of how many ranks, how many cross nodes, and over how many."""
    groups = make_groups(plan)
    return {
        kind: {
            "count": len(members),
            "size": len(members[0]),
            "crossing": len(groups.crossing(kind)),
            "nodes": groups.widest(kind),
        }
        for kind, members in groups.members.items()
        if members
    }


def gpu_problems(experiment: Experiment, gpu: Gpu | None) -> list[Problem]:
    """What the GPU cannot do of what is asked."""
    if gpu is None or gpu.bf16 or experiment.precision != "bf16":
        return []
    what = f"a {gpu.name} has no bf16: its compute capability is below 8.0"
    return [Problem("precision", what, "bf16", "use fp16 or fp32", ("fp16", "fp32"))]


def _notes(experiment: Experiment, assumptions: Assumptions) -> list[str]:
    notes = []
    if experiment.model.vocab_size is None:
        notes.append(f"model.vocab_size is left to the data: GPT-2's {GPT2_TOKENS:,} tokens are taken for granted")
    if assumptions.gpu is None:
        notes.append("no GPU is named (--gpu, or gpu: beside the hostfile): memory is shown, and held against nothing")
    return notes
