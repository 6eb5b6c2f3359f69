"""Searches all layouts of an experiment on a cluster: first those that fit, then the tight ones, each the fastest
first, and the reasons against the others.

The search varies parallel sizes, sequence parallelism, the distributed optimizer or the ZeRO stage, the micro batch and
recomputation. The model, the engine and the global batch stay as the experiment gives them. If a layout fits only
with recomputation, the search also lists it with the fewest recomputed layers that fit. If none fits, it tries states
in the host's memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter

from tridock.engines import engine_of
from tridock.engines.engine import Choice
from tridock.engines.fields import as_overrides, as_yaml
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout.shape import recomputed_layers, unlike_stages
from tridock.layout.split import size_of_replica
from tridock.plan.assess import gpu_problems
from tridock.plan.assumptions import Assumptions
from tridock.plan.cost import Cost, cost_of
from tridock.plan.legality import layout_problems
from tridock.plan.memory import GIB, StageMemory, communicators, memory_of_stage
from tridock.plan.rates import Rates


@dataclass(frozen=True, slots=True)
class Candidate:
    choice: Choice
    experiment: Experiment
    data_parallel_size: int
    worst: StageMemory
    """The stage that needs the most memory."""
    cost: Cost

    @property
    def seconds(self) -> float:
        assert self.cost.estimate is not None
        return self.cost.estimate.iteration

    def gpu_hours(self, tokens: float | None) -> float:
        """Returns the GPU hours of all ranks together for ``tokens``, or for the tokens of the run."""
        tokens = tokens or float(self.experiment.train.train_iters * self.cost.tokens)
        days = self.cost.days(tokens)
        assert days is not None
        return 24 * days * self.data_parallel_size * size_of_replica(self.experiment)

    @property
    def tenths_of_gib(self) -> int:
        """Returns the memory of the fullest rank in tenths of a GiB."""
        return round(10 * self.worst.total_bytes / GIB)


@dataclass(frozen=True, slots=True)
class Rejected:
    choice: Choice
    reason: str
    is_legal: bool = False
    """Whether the layout could run, but does not fit."""


@dataclass(frozen=True, slots=True)
class Search:
    """The result: layouts that fit with room to spare before tight ones, the fastest first."""

    found: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    rates: Rates

    @property
    def pareto_front(self) -> tuple[Candidate, ...]:
        """Returns the Pareto front of time and memory, the fastest first: no other layout is as fast with less memory,
        nor needs as little memory and is faster. Memory counts in tenths of a GiB, as it is shown."""
        best: list[Candidate] = []
        for one in sorted(self.found, key=lambda one: (one.seconds, one.worst.total_bytes)):
            if not best or one.tenths_of_gib < best[-1].tenths_of_gib:
                best.append(one)
        return tuple(best)


def search(
    experiment: Experiment,
    slots: Mapping[str, Sequence[int]],
    source: str,
    assumptions: Assumptions,
    on_tried: Callable[[int, int], None] = lambda _done, _of: None,
) -> Search:
    """Tries every layout; ``on_tried`` receives the number done and the total.

    Raises :class:`RequestError` if neither memory nor time can be judged.
    """
    world_size = sum(len(numbers) for numbers in slots.values())
    per_node = min(len(numbers) for numbers in slots.values())
    rates = assumptions.rates(experiment, assumptions.shape(1, 1, per_node, world_size))
    if assumptions.gpu is None or rates.device is None:
        todo = "give --gpu (with its memory alone, also --tflops), or gpu: in the settings beside the hostfile"
        if assumptions.correction is not None and rates.device is not None:
            todo = "give --gpu with the memory of a device, as in 24gib"
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

    def judge(choice: Choice) -> None:
        outcome = _judge(choice, with_choice(fixed, choice), world_size, per_node, assumptions, rates)
        if isinstance(outcome, Candidate):
            found.append(outcome)
        else:
            rejected.append(outcome)

    for number, choice in enumerate(every, start=1):
        judge(choice)
        on_tried(number, len(every))
    if not found:
        for choice in every:
            for offload in engine_of(fixed).offload_choices(with_choice(fixed, choice)):
                judge({**choice, **offload})
    found += list(_with_less_recomputation(fixed, found, world_size, per_node, assumptions, rates))
    found.sort(key=lambda one: (one.worst.fit != "fits", one.seconds, one.worst.total_bytes))
    return Search(tuple(found), tuple(rejected), rates)


def _judge(
    choice: Choice, candidate: Experiment, world_size: int, per_node: int, assumptions: Assumptions, rates: Rates
) -> Candidate | Rejected:
    problems = layout_problems(candidate, world_size, per_node)
    if problems:
        return Rejected(choice, f"{problems[0].where} {problems[0].what}")
    tensor, data = candidate.parallel.tensor_model_parallel_size, world_size // size_of_replica(candidate)
    steps = candidate.batch.samples_per_step(data) // (candidate.batch.micro_batch_size * data)
    shape = assumptions.shape(data, steps, per_node, world_size)
    if shape.slots % tensor:
        return Rejected(choice, f"tensor parallel groups of {tensor} would cross nodes of {per_node} slots")
    if candidate.parallel.use_distributed_optimizer and data * candidate.parallel.context_parallel_size == 1:
        return Rejected(choice, "there is one replica: nothing to share the optimizer's states with")
    stages = unlike_stages(candidate)
    gpu, correction, groups = assumptions.gpu, assumptions.correction, communicators(candidate, shape)
    attention = assumptions.attention
    memory = [memory_of_stage(candidate, stage, shape, gpu, correction, groups, attention) for stage in stages]
    worst = max(memory, key=lambda stage: stage.total_bytes)
    if worst.fit == "no-fit":
        return Rejected(choice, "does not fit the GPU's memory", is_legal=True)
    cost = cost_of(candidate, shape, max(stage.state_bytes for stage in memory), rates)
    return Candidate(choice, candidate, data, worst, cost)


def _with_less_recomputation(
    fixed: Experiment,
    found: Sequence[Candidate],
    world_size: int,
    per_node: int,
    assumptions: Assumptions,
    rates: Rates,
) -> Iterator[Candidate]:
    """Finds for each layout, by bisection, the fewest recomputed layers with the same verdict as all."""
    without = {(_layout_of(one.choice), one.worst.fit) for one in found if not _recomputes_layers(one)}
    for one in found:
        if {(_layout_of(one.choice), fit) for fit in ("fits", one.worst.fit)} & without:
            continue
        ways = engine_of(one.experiment).partial_recompute_choices(one.experiment)
        least: Candidate | None = None
        low, high = 0, len(ways)
        while low < high:
            middle = (low + high) // 2
            choice = {**one.choice, **ways[middle]}
            judged = _judge(choice, with_choice(fixed, choice), world_size, per_node, assumptions, rates)
            if isinstance(judged, Candidate) and judged.worst.fit == one.worst.fit:
                least, high = judged, middle
            else:
                low = middle + 1
        if least is not None:
            yield least


def _layout_of(choice: Choice) -> tuple[tuple[str, str], ...]:
    """Returns the choice without its recomputation fields."""
    return tuple((path, as_yaml(value)) for path, value in choice.items() if not path.startswith("model."))


def _recomputes_layers(candidate: Candidate) -> bool:
    experiment = candidate.experiment
    return recomputed_layers(experiment, experiment.model.num_layers) > 0


def with_global_batch(experiment: Experiment, world_size: int) -> Experiment:
    """Fixes the present global batch, so that all layouts do the same work."""
    replicas = world_size // size_of_replica(experiment)
    return experiment.resolved(max(1, replicas))


def with_choice(experiment: Experiment, choice: Choice) -> Experiment:
    parts: dict[str, dict[str, object]] = {}
    update: dict[str, object] = {}
    for path, value in choice.items():
        section, _, field = path.partition(".")
        if field:
            parts.setdefault(section, {})[field] = value
        else:
            update[path] = value
    update |= {name: getattr(experiment, name).model_copy(update=fields) for name, fields in parts.items()}
    return experiment.model_copy(update=update)


def value_of(experiment: Experiment, path: str) -> object:
    """Returns the value of a field, such as ``parallel.zero_stage``."""
    return attrgetter(path)(experiment)


def choices(experiment: Experiment, world_size: int) -> Iterator[Choice]:
    """Yields every combination of the engine's options; skips sizes that do not divide the world."""
    engine, samples = engine_of(experiment), experiment.batch.samples_per_step(1)
    for layout in layouts(experiment, world_size):
        replicas = max(1, world_size // size_of_replica(with_choice(experiment, layout)))
        for recompute, micro in product(engine.recompute_choices(), _divisors_up_to(samples, 16)):
            if not engine.is_repeated(layout, replicas, samples // (micro * replicas)):
                yield {**layout, **recompute, "batch.micro_batch_size": micro}


def layouts(experiment: Experiment, world_size: int) -> Iterator[Choice]:
    """Yields every way to split the model and partition its states; skips sizes that do not divide the world."""
    engine = engine_of(experiment)
    if not engine.splits_model(experiment):
        yield from engine.state_choices(experiment, 1)
        return
    for tensor, stages, context in product(
        _divisors_up_to(world_size, 64), _divisors_up_to(world_size, 128), engine.context_sizes(experiment)
    ):
        if world_size % (tensor * stages * context):
            continue
        sizes = {
            "parallel.tensor_model_parallel_size": tensor,
            "parallel.pipeline_model_parallel_size": stages,
            "parallel.context_parallel_size": context,
        }
        for states in engine.state_choices(experiment, stages):
            for others in engine.layout_choices(experiment, tensor, stages):
                yield {**sizes, **others, **states}


def _divisors_up_to(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, min(number, most) + 1) if number % size == 0)


def count_reasons(rejected: Sequence[Rejected]) -> list[tuple[str, int]]:
    """Returns each reason with the number of layouts that it rules out, the most frequent first."""
    counts: dict[str, int] = {}
    for one in rejected:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])


def overrides_of(candidate: Candidate, base: Experiment) -> list[str]:
    """Returns the ``--set`` overrides that turn the base experiment into the candidate."""
    return as_overrides({path: value for path, value in candidate.choice.items() if value_of(base, path) != value})
