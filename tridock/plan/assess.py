"""The verdict on an experiment and a cluster: every reason why it cannot run, or its plan, memory and cost."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from tridock.contracts.codec import as_json
from tridock.engines import NO_ESTIMATE, RankProgram, checkpoints_folder, cost_model_of, rank_program
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout.groups import make_groups, warnings
from tridock.layout.plan import Plan, Slots, lay_out, size_of_world, slots_per_node
from tridock.layout.shape import GPT2_TOKENS, LayoutShape, Term
from tridock.layout.split import size_of_replica
from tridock.plan.assumptions import Assumptions
from tridock.plan.cost import Cost, cost_of
from tridock.plan.goodput import Goodput, goodput_of
from tridock.plan.legality import layout_problems
from tridock.plan.memory import GIB, HostMemory, StageMemory, host_memory, memory_of_stages

Verdict = Literal["fits", "tight", "no-fit", "illegal"]


@dataclass(frozen=True)
class Assessment:
    """What the planner knows of a run before it starts."""

    experiment: Experiment
    slots: Slots
    source: str
    assumptions: Assumptions
    problems: tuple[Problem, ...]
    shape: LayoutShape | None = None
    """None if the experiment is illegal; the next two are then empty."""
    memory: tuple[StageMemory, ...] = ()
    """Empty also if the engine has no cost model."""
    cost: Cost | None = None

    @cached_property
    def plan(self) -> Plan | None:
        """The ranks and the batch; None if the experiment is illegal."""
        return None if self.problems else lay_out(self.experiment, self.slots)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What would make the run slow: groups that cross nodes although another layout avoids it."""
        return tuple(warnings(self.laid_out)) if self.shape is not None and self.shape.nodes == 1 else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed, and what to give instead."""
        return () if self.cost is None else tuple(_notes(self, self.cost))

    @cached_property
    def goodput(self) -> Goodput | None:
        """None if the failure rate is not given, or the time of an iteration is unknown."""
        failures, gpu = self.assumptions.failures, self.assumptions.gpu
        if failures is None or self.shape is None or self.seconds is None:
            return None
        return goodput_of(self.experiment, self.shape, self.seconds, len(self.slots), failures, gpu)

    @property
    def seconds(self) -> float | None:
        """The time of an iteration; None if it is not estimated."""
        return None if self.cost is None or self.cost.estimate is None else self.cost.estimate.iteration

    @property
    def data_parallel_size(self) -> int:
        return size_of_world(self.slots) // size_of_replica(self.experiment)

    @property
    def verdict(self) -> Verdict:
        """``fits`` if the GPU or the memory is unknown: nothing rules the run out."""
        if self.problems:
            return "illegal"
        fits = [stage.fit for stage in self.memory]
        return "no-fit" if "no-fit" in fits else "tight" if "tight" in fits else "fits"

    @property
    def resolved(self) -> Self:
        """Returns it with the values that depend on the cluster in its experiment, as a run's folder stores it."""
        return replace(self, experiment=self.experiment.resolved(self.laid_out.data_parallel_size))

    @property
    def worst(self) -> StageMemory | None:
        """The stage that needs the most memory; None if :attr:`memory` is empty."""
        return max(self.memory, key=lambda stage: stage.total_bytes, default=None)

    @property
    def laid_out(self) -> Plan:
        """Returns the plan of a legal experiment."""
        assert self.plan is not None
        return self.plan

    def checked(self, *, force: bool = False) -> Plan:
        """Returns the plan. Raises :class:`RequestError` with every reason against the run: it is illegal, or does not
        fit.

        ``force`` accepts a plan that does not fit.
        """
        problems = [replace(problem, where=f"{self.source}: {problem.where}") for problem in self.problems]
        if not force:
            problems += [replace(problem, where=self.source) for problem in self._too_large()]
        RequestError.raise_for(problems)
        return self.laid_out

    @property
    def reasons(self) -> tuple[Problem, ...]:
        """Every reason against the run."""
        return (*self.problems, *self._too_large())

    def program(self, run_id: str, path: str, *, resume: bool = False) -> RankProgram:
        """Returns the program of a rank of the run in ``path``, as :func:`rank_program` does."""
        return rank_program(self.experiment, self.laid_out, run_id, path, resume=resume)

    def checkpoints(self, path: str) -> str:
        """Returns the folder of the checkpoints of the run in ``path``."""
        return checkpoints_folder(self.experiment, path)

    def _too_large(self) -> Iterator[Problem]:
        """Yields the problem of a plan that does not fit."""
        gpu, worst = self.assumptions.gpu, self.worst
        if self.verdict == "no-fit" and gpu is not None and worst is not None:
            todo = "see `tridock plan --search` for layouts that fit, or start it all the same with --force"
            has = f"{gpu.memory_mib / 1024:.1f} GiB"
            what = f"a rank of stage {worst.stage} needs more memory than the {has} of a {gpu.name}"
            yield Problem("memory", what, f"{worst.total_bytes / GIB:.1f} GiB", todo)

    def document(self) -> dict[str, Any]:
        """Returns what ``--json`` prints and ``plan.json`` holds."""
        plan = {} if self.plan is None else self.plan.document()
        return {
            "verdict": self.verdict,
            "problems": [problem.document for problem in self.reasons],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            **plan,
            "ranks": plan.get("ranks", []),
            "groups": {} if self.plan is None else _groups(self.plan),
            "memory": self._memory(),
            "host_memory": {node: asdict(it) for node, it in self.host_memory.items()},
            "checkpoint_bytes": self.checkpoint_bytes,
            "cost": None if self.cost is None else self._cost(self.cost),
            **({} if self.goodput is None else {"goodput": self._goodput(self.goodput)}),
            **({} if self.assumptions.correction is None else {"from_run": self.assumptions.correction.document()}),
        }

    def to_json(self) -> str:
        return as_json(self.document()) + "\n"

    @property
    def host_memory(self) -> dict[str, HostMemory]:
        """Returns what each node's host must have for offloaded states; empty if nothing is offloaded."""
        return {} if self.plan is None else host_memory(self.plan, self.memory)

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
                    "terms": [_term(term) for term in stage.terms],
                    "startup_bytes": stage.startup_bytes,
                    "checkpoint_copy_bytes": stage.copied_bytes,
                    "offloaded_bytes": stage.offloaded_bytes,
                    "nvme_bytes": stage.nvme_bytes,
                    "total_bytes": stage.total_bytes,
                    "total_gib": round(stage.total_bytes / GIB, 4),
                    "least_gib": round(stage.least_bytes / GIB, 4),
                    "most_gib": round(stage.most_bytes / GIB, 4),
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
                "compute": cost.estimate.compute,
                "iteration": cost.estimate.iteration,
                "tokens_per_day": cost.estimate.tokens_per_second * 86400,
                "tokens": tokens,
                "days": cost.days(tokens),
                "days_range": cost.estimate.times_of(cost.days(tokens) or 0.0),
                "tokens_per_second_range": cost.estimate.speeds,
                "gpu_hours": self.gpu_hours,
                "cost": self.price,
                "energy_kwh": self.energy_kwh,
            }
        return {**asdict(cost), "estimate": estimate}

    def _goodput(self, goodput: Goodput) -> dict[str, Any]:
        share, hours, price = goodput.used.goodput, self.gpu_hours, self.price
        assert hours is not None
        return {
            **goodput.document(),
            "days": None if share == 0 else hours / self.laid_out.world_size / 24 / share,
            "gpu_hours": None if share == 0 else hours / share,
            "cost": None if price is None or share == 0 else price / share,
        }

    @property
    def checkpoint_bytes(self) -> int | None:
        """Returns the bytes of one checkpoint, all its files together; None if :attr:`memory` is empty."""
        return cost_model_of(self.experiment).checkpoint_bytes(self.experiment) if self.memory else None

    @property
    def energy_kwh(self) -> float | None:
        """Returns the energy of the GPUs at their power limit for :attr:`gpu_hours`, without hosts and cooling."""
        gpu, hours = self.assumptions.gpu, self.gpu_hours
        return None if gpu is None or gpu.watts is None or hours is None else gpu.watts * hours / 1000

    @property
    def gpu_hours(self) -> float | None:
        """Returns the GPU hours of all ranks together for :attr:`tokens`; None without an estimate."""
        days = None if self.cost is None else self.cost.days(self.tokens)
        return None if days is None else 24 * days * self.laid_out.world_size

    @property
    def price(self) -> float | None:
        """Returns the price of the GPU hours; None if the price of an hour is not given."""
        hours, each = self.gpu_hours, self.assumptions.cost_per_gpu_hour
        return None if hours is None or each is None else hours * each

    @property
    def tokens(self) -> float:
        """Returns the number of tokens that the cost is for."""
        if self.assumptions.tokens is not None:
            return self.assumptions.tokens
        return float(self.experiment.train.train_iters * (self.cost.tokens if self.cost is not None else 0))


def assess(
    experiment: Experiment,
    slots: Slots,
    source: str,
    assumptions: Assumptions = Assumptions(),  # noqa: B008  frozen
) -> Assessment:
    """Assesses the experiment on ``slots``. Contacts no host.

    ``source`` (the experiment's file) is the prefix of the messages of :meth:`Assessment.checked`.
    """
    world_size, per_node = size_of_world(slots), slots_per_node(slots)
    if problems := layout_problems(experiment, world_size, per_node, assumptions.gpu):
        return Assessment(experiment, slots, source, assumptions, tuple(problems))
    shape = assumptions.shape(experiment, world_size, per_node)
    attention = assumptions.attention_of(experiment)
    memory = memory_of_stages(experiment, shape, assumptions.gpu, assumptions.correction, attention)
    states = max((stage.state_bytes for stage in memory), default=0)
    cost = cost_of(experiment, shape, states, assumptions.rates(experiment, shape))
    return Assessment(experiment, slots, source, assumptions, (), shape, memory, cost)


def _term(term: Term) -> dict[str, Any]:
    return {"name": term.name, "bytes": term.bytes, "gib": round(term.bytes / GIB, 4), "source": term.source}


def _groups(plan: Plan) -> dict[str, dict[str, int]]:
    """Returns for each kind the number of groups, their ranks, how many cross nodes, and over how many nodes."""
    groups = make_groups(plan)
    return {
        kind: {
            "count": len(members),
            "size": len(members[0]),
            "crossing": sum(nodes > 1 for nodes in spans),
            "nodes": max(spans),
        }
        for kind, members in groups.members.items()
        if (spans := groups.spans(kind))
    }


def _notes(assessment: Assessment, cost: Cost) -> Iterator[str]:
    experiment, assumptions = assessment.experiment, assessment.assumptions
    if experiment.model.vocab_size is None:
        yield f"model.vocab_size is left to the data: GPT-2's {GPT2_TOKENS:,} tokens are assumed"
    if not assessment.memory:
        yield f"engine {experiment.engine} {NO_ESTIMATE}"
    elif assumptions.gpu is None:
        yield "no GPU is named (--gpu, or gpu: beside the hostfile): memory is shown, but not compared with a limit"
    elif assumptions.gpu.is_amd:
        yield f"{assumptions.gpu.name} is only planned, from its data sheet: Tridock's image has CUDA, not ROCm"
    run, gpu = assumptions.correction, assumptions.gpu
    if run is not None and run.gpu != gpu:
        ran, now = ("unknown devices" if one is None else one.name for one in (run.gpu, gpu))
        yield f"{run.source} ran on {ran}: its factors are taken for {now} too"
    crossing = any(one.link == "network" for one in cost.traffic)
    if crossing and cost.estimate is not None and assumptions.network_gbit is None:
        text = f"the network's rate is {cost.rates.network_source}"
        yield f"{text} (--network-gbit, or network_gbit: beside the hostfile)"
