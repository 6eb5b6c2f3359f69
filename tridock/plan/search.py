"""Searches all layouts of an experiment on a cluster: first those that fit, then the tight ones, each the fastest
first, and the reasons against the others.

The search varies parallel sizes, sequence parallelism, the distributed optimizer or the ZeRO stage, the micro batch and
recomputation. The model, the engine and the global batch stay as the experiment gives them. If a layout fits only
with recomputation, the search also lists it with the fewest recomputed layers that fit. If none fits, it tries states
in the host's memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter

from tridock.engines import cost_model_of, rules_of
from tridock.engines.fields import as_overrides, as_yaml
from tridock.engines.rules import Choice
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout.plan import Slots, size_of_world, slots_per_node
from tridock.layout.shape import recomputed_layers, unlike_stages
from tridock.layout.split import divisors, size_of_replica
from tridock.plan.assumptions import Assumptions
from tridock.plan.cost import Cost, Estimate, cost_of
from tridock.plan.legality import gpu_problems, layout_problems
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
    def estimate(self) -> Estimate:
        assert self.cost.estimate is not None
        return self.cost.estimate

    @property
    def seconds(self) -> float:
        return self.estimate.iteration

    def gpu_hours(self, tokens: float | None) -> float:
        """Returns the GPU hours of all ranks together for ``tokens``, or for the tokens of the run."""
        tokens = tokens or float(self.experiment.train.train_iters * self.cost.tokens)
        ranks = self.data_parallel_size * size_of_replica(self.experiment)
        return tokens / self.estimate.tokens_per_second / 3600 * ranks

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
    slots: Slots,
    source: str,
    assumptions: Assumptions,
    on_tried: Callable[[int, int], None] = lambda _done, _of: None,
) -> Search:
    """Tries every layout; ``on_tried`` receives the number done and the total.

    Raises :class:`RequestError` if neither memory nor time can be judged.
    """
    cost_model_of(experiment)
    world_size, per_node = size_of_world(slots), slots_per_node(slots)
    fixed = with_global_batch(experiment, world_size)
    rates = assumptions.rates(experiment, assumptions.shape(fixed, world_size, per_node))
    if assumptions.gpu is None or rates.device is None:
        todo = "give --gpu (with its memory alone, also --tflops), gpu: beside the hostfile, or --ask-hosts"
        if assumptions.correction is not None and rates.device is not None:
            todo = "give --gpu with the memory of a device, as in 24gib"
        raise RequestError(Problem(source, "a search needs to know the GPU", "", todo))
    if experiment.model.is_vision and assumptions.tflops is None:
        what = "a search needs to know how fast a GPU is with convolutions"
        raise RequestError(Problem(source, what, "", "give a measured rate with --tflops"))
    RequestError.raise_for(gpu_problems(experiment, assumptions.gpu))
    found: list[Candidate] = []
    rejected: list[Rejected] = []
    every = list(choices(fixed, world_size))

    def judge(choice: Choice) -> Candidate | Rejected:
        return _judge(choice, fixed.with_fields(choice), world_size, per_node, assumptions, rates)

    def sort(outcome: Candidate | Rejected) -> None:
        if isinstance(outcome, Candidate):
            found.append(outcome)
        else:
            rejected.append(outcome)

    for number, choice in enumerate(every, start=1):
        sort(judge(choice))
        on_tried(number, len(every))
    if not found:
        for choice in every:
            for offload in rules_of(fixed).offload_choices(fixed.with_fields(choice)):
                sort(judge({**choice, **offload}))
    found += list(_with_less_recomputation(found, judge))
    found.sort(key=lambda one: (one.worst.fit != "fits", one.seconds, one.worst.total_bytes))
    return Search(tuple(found), tuple(rejected), rates)


def _judge(
    choice: Choice, candidate: Experiment, world_size: int, per_node: int, assumptions: Assumptions, rates: Rates
) -> Candidate | Rejected:
    problems = layout_problems(candidate, world_size, per_node)
    if problems:
        return Rejected(choice, f"{problems[0].where} {problems[0].what}")
    tensor, data = candidate.parallel.tensor_model_parallel_size, world_size // size_of_replica(candidate)
    shape = assumptions.shape(candidate, world_size, per_node)
    if shape.slots % tensor:
        return Rejected(choice, f"tensor parallel groups of {tensor} would cross nodes of {per_node} slots")
    if candidate.parallel.use_distributed_optimizer and data * candidate.parallel.context_parallel_size == 1:
        return Rejected(choice, "there is one replica: nothing to share the optimizer's states with")
    gpu, correction, groups = assumptions.gpu, assumptions.correction, communicators(candidate, shape)
    attention = assumptions.attention_of(candidate)
    memory = [
        memory_of_stage(candidate, stage, shape, gpu, correction, groups, attention)
        for stage in unlike_stages(candidate)
    ]
    worst = max(memory, key=lambda stage: stage.total_bytes)
    if worst.fit == "no-fit":
        return Rejected(choice, "does not fit the GPU's memory", is_legal=True)
    cost = cost_of(candidate, shape, max(stage.state_bytes for stage in memory), rates)
    return Candidate(choice, candidate, data, worst, cost)


def _with_less_recomputation(
    found: Sequence[Candidate], judge: Callable[[Choice], Candidate | Rejected]
) -> Iterator[Candidate]:
    """Finds for each layout, by bisection, the fewest recomputed layers with the same verdict as all."""
    without = {
        (_layout_of(one.choice), one.worst.fit)
        for one in found
        if not recomputed_layers(one.experiment, one.experiment.model.num_layers)
    }
    for one in found:
        if {(_layout_of(one.choice), fit) for fit in ("fits", one.worst.fit)} & without:
            continue
        ways = rules_of(one.experiment).partial_recompute_choices(one.experiment)
        least: Candidate | None = None
        low, high = 0, len(ways)
        while low < high:
            middle = (low + high) // 2
            judged = judge({**one.choice, **ways[middle]})
            if isinstance(judged, Candidate) and judged.worst.fit == one.worst.fit:
                least, high = judged, middle
            else:
                low = middle + 1
        if least is not None:
            yield least


def _layout_of(choice: Choice) -> tuple[tuple[str, str], ...]:
    """Returns the choice without its recomputation fields."""
    return tuple((path, as_yaml(value)) for path, value in choice.items() if not path.startswith("model."))


def with_global_batch(experiment: Experiment, world_size: int) -> Experiment:
    """Fixes the present global batch, so that all layouts do the same work."""
    return experiment.resolved(max(1, world_size // size_of_replica(experiment)))


def choices(experiment: Experiment, world_size: int) -> Iterator[Choice]:
    """Yields every combination of the engine's options; skips sizes that do not divide the world."""
    rules, samples = rules_of(experiment), experiment.batch.samples_per_step(1)
    for layout in layouts(experiment, world_size):
        replicas = max(1, world_size // size_of_replica(experiment.with_fields(layout)))
        for recompute, micro in product(rules.recompute_choices(), _divisors_up_to(samples, 16)):
            if not rules.is_repeated(layout, replicas, samples // (micro * replicas)):
                yield {**layout, **recompute, "batch.micro_batch_size": micro}


def layouts(experiment: Experiment, world_size: int) -> Iterator[Choice]:
    """Yields every way to split the model and partition its states; skips sizes that do not divide the world."""
    rules = rules_of(experiment)
    if not rules.splits_model(experiment):
        yield from rules.state_choices(experiment, 1)
        return
    for tensor, stages, context in product(
        _divisors_up_to(world_size, 64), _divisors_up_to(world_size, 128), rules.context_sizes(experiment)
    ):
        if world_size % (tensor * stages * context):
            continue
        sizes = {
            "parallel.tensor_model_parallel_size": tensor,
            "parallel.pipeline_model_parallel_size": stages,
            "parallel.context_parallel_size": context,
        }
        for states in rules.state_choices(experiment, stages):
            for others in rules.layout_choices(experiment, tensor, stages):
                yield {**sizes, **others, **states}


def _divisors_up_to(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in divisors(number) if size <= most)


def count_reasons(rejected: Sequence[Rejected]) -> list[tuple[str, int]]:
    """Returns each reason with the number of layouts that it rules out, the most frequent first."""
    return Counter(one.reason for one in rejected).most_common()


def overrides_of(candidate: Candidate, base: Experiment) -> list[str]:
    """Returns the ``--set`` overrides that turn the base experiment into the candidate, with its global batch."""
    changes = {path: value for path, value in candidate.choice.items() if attrgetter(path)(base) != value}
    samples = candidate.experiment.batch.global_batch_size
    if base.with_fields(changes).batch.samples_per_step(candidate.data_parallel_size) != samples:
        changes["batch.global_batch_size"] = samples
    return as_overrides(changes)
