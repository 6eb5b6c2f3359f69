"""All layouts of an experiment on a cluster: those that fit, then the tight ones, the fastest first; and why others do
not.

Varied are the layout's sizes, sequence parallelism, the distributed optimizer or the ZeRO stage, the micro batch and
recomputation; what the experiment says of the model, the engine and the global batch stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tridock.engines import engine_of
from tridock.engines.engine import Choice
from tridock.engines.fields import as_yaml
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout.shape import Shape
from tridock.layout.split import size_of_replica
from tridock.plan.assess import gpu_problems
from tridock.plan.assumptions import Assumptions
from tridock.plan.cost import Cost, cost_of
from tridock.plan.legality import layout_problems
from tridock.plan.memory import StageMemory, communicators, memory_of_stage
from tridock.plan.rates import Rates


@dataclass(frozen=True, slots=True)
class Candidate:
    choice: Choice
    experiment: Experiment
    data_parallel_size: int
    worst: StageMemory
    """Of the stages that can need most: the first and the last."""
    cost: Cost

    @property
    def seconds(self) -> float:
        assert self.cost.estimate is not None
        return self.cost.estimate.iteration


@dataclass(frozen=True, slots=True)
class Rejected:
    choice: Choice
    reason: str


@dataclass(frozen=True, slots=True)
class Search:
    """What was found: what fits with room to spare before what is tight, and the fastest first."""

    found: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    rates: Rates

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of time and memory, the fastest first: no other layout is as fast with less memory, nor
        needs as little memory and is faster."""
        best: list[Candidate] = []
        for one in sorted(self.found, key=lambda one: (one.seconds, one.worst.total_bytes)):
            if not best or one.worst.total_bytes < best[-1].worst.total_bytes:
                best.append(one)
        return tuple(best)


def search(
    experiment: Experiment,
    slots: Mapping[str, Sequence[int]],
    source: str,
    assumptions: Assumptions,
    tried: Callable[[int, int], None] = lambda _done, _of: None,
) -> Search:
    """Tries every layout; ``tried`` is told how many of how many.

    Raises :class:`RequestError` where nothing is known to judge them by.
    """
    world_size = sum(len(numbers) for numbers in slots.values())
    per_node = min(len(numbers) for numbers in slots.values())
    rates = assumptions.rates(experiment, per_node)
    if assumptions.gpu is None or rates.device is None:
        todo = "give --gpu (with its memory alone, also --tflops), or gpu: in the settings beside the hostfile"
        raise RequestError(Problem(source, "a search needs to know the GPU", "", todo))
    if experiment.model.is_vision and assumptions.tflops is None:
        what = "a search needs to know how fast a GPU is with convolutions"
        raise RequestError(Problem(source, what, "", "give a measured rate with --tflops"))
    if problems := gpu_problems(experiment, assumptions.gpu):
        raise RequestError(problems)
    fixed = with_global_batch(experiment, world_size)
    found: list[Candidate] = []
    rejected: list[Rejected] = []
    every = list(choices(fixed, world_size))
    for number, choice in enumerate(every, start=1):
        outcome = _judge(choice, with_choice(fixed, choice), world_size, per_node, assumptions, rates)
        if isinstance(outcome, Candidate):
            found.append(outcome)
        else:
            rejected.append(outcome)
        tried(number, len(every))
    found.sort(key=lambda one: (one.worst.fit != "fits", one.seconds, one.worst.total_bytes))
    return Search(tuple(found), tuple(rejected), rates)


def _judge(
    choice: Choice, candidate: Experiment, world_size: int, per_node: int, assumptions: Assumptions, rates: Rates
) -> Candidate | Rejected:
    problems = layout_problems(candidate, world_size)
    if problems:
        return Rejected(choice, f"{problems[0].where} {problems[0].what}")
    tensor = candidate.parallel.tensor_model_parallel_size
    if per_node % tensor:
        return Rejected(choice, f"tensor parallel groups of {tensor} would cross nodes of {per_node} slots")
    data = world_size // size_of_replica(candidate)
    if candidate.parallel.use_distributed_optimizer and data * candidate.parallel.context_parallel_size == 1:
        return Rejected(choice, "there is one replica: nothing to share the optimizer's states with")
    steps = candidate.batch.samples_per_step(data) // (candidate.batch.micro_batch_size * data)
    shape = Shape(data, steps, per_node)
    stages = {0, candidate.parallel.pipeline_model_parallel_size - 1}
    gpu, correction, groups = assumptions.gpu, assumptions.correction, communicators(candidate, shape)
    memory = [memory_of_stage(candidate, stage, shape, gpu, correction, groups) for stage in stages]
    worst = max(memory, key=lambda stage: stage.total_bytes)
    if worst.fit == "no-fit":
        return Rejected(choice, "does not fit the GPU's memory")
    cost = cost_of(candidate, shape, max(stage.state_bytes for stage in memory), rates)
    return Candidate(choice, candidate, data, worst, cost)


def with_global_batch(experiment: Experiment, world_size: int) -> Experiment:
    """With the global batch that it has now: layouts are compared on the same work."""
    replicas = world_size // size_of_replica(experiment)
    return experiment.resolved(max(1, replicas))


def with_choice(experiment: Experiment, choice: Choice) -> Experiment:
    parts: dict[str, dict[str, object]] = {}
    for path, value in choice.items():
        section, _, field = path.partition(".")
        parts.setdefault(section, {})[field] = value
    update = {name: getattr(experiment, name).model_copy(update=fields) for name, fields in parts.items()}
    return experiment.model_copy(update=update)


def value_of(experiment: Experiment, path: str) -> object:
    """Of a field of a section, as ``parallel.zero_stage``."""
    section, _, field = path.partition(".")
    value: object = getattr(getattr(experiment, section), field)
    return value


def choices(experiment: Experiment, world_size: int) -> Iterator[Choice]:
    """Every combination of the engine's options; sizes that do not divide the world are left out unsaid."""
    micro_batches = _divisors_up_to(experiment.batch.samples_per_step(1), 16)
    for layout, recompute, micro in product(
        layouts(experiment, world_size), engine_of(experiment).recompute_choices(), micro_batches
    ):
        yield {**layout, **recompute, "batch.micro_batch_size": micro}


def layouts(experiment: Experiment, world_size: int) -> Iterator[Choice]:
    """Every way to split the model and partition its states; sizes that do not divide the world are left out unsaid."""
    engine, context = engine_of(experiment), experiment.parallel.context_parallel_size
    if not engine.splits_model(experiment):
        yield from engine.state_choices(experiment, 1)
        return
    for tensor, stages in product(_divisors_up_to(world_size, 64), _divisors_up_to(world_size, 128)):
        if world_size % (tensor * stages * context):
            continue
        sizes = {
            "parallel.tensor_model_parallel_size": tensor,
            "parallel.pipeline_model_parallel_size": stages,
        }
        for states in engine.state_choices(experiment, stages):
            for others in engine.layout_choices(experiment, tensor, stages):
                yield {**sizes, **others, **states}


def _divisors_up_to(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, min(number, most) + 1) if number % size == 0)


def reasons(rejected: Sequence[Rejected]) -> list[tuple[str, int]]:
    """Each reason with the number of layouts that it stands against, the most frequent first."""
    counts: dict[str, int] = {}
    for one in rejected:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])


def overrides_of(candidate: Candidate, base: Experiment) -> list[str]:
    """``--set`` overrides that turn the experiment into this one."""
    choice = candidate.choice.items()
    return [f"{path}={as_yaml(value)}" for path, value in choice if value_of(base, path) != value]
