"""What a run that has lost a node continues as: fewer data parallel replicas, or (megatron-core) another layout.

The global batch, the micro batch and the optimizer stay: a replica works through more micro batches, and the run has
the mathematics that it had.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from tridock.experiment import Experiment
from tridock.layout.split import size_of_replica
from tridock.plan.assess import Assessment, assess
from tridock.plan.assumptions import Assumptions
from tridock.plan.search import layouts

Slots = Mapping[str, Sequence[int]]


def fewer_replicas(
    experiment: Experiment, slots: Slots, source: str, assumptions: Assumptions, *, force: bool = False
) -> Assessment | None:
    """The same replica as often as ``slots`` and the global batch allow; None where not even one fits.

    ``slots`` come in the order of the ranks; the last are left over. ``force``: the GPU's memory does not count.
    """
    size = size_of_replica(experiment)
    for replicas in range(_count(slots) // size, 0, -1):
        assessment = assess(experiment, first_slots(slots, replicas * size), source, assumptions)
        if _runs(assessment, force):
            return assessment
    return None


def other_layout(
    experiment: Experiment, slots: Slots, source: str, assumptions: Assumptions, *, force: bool = False
) -> Assessment | None:
    """megatron-core: the best layout on as many of ``slots`` as there is one for; None where there is none.

    Best by the estimated time, or where nobody knows that, the one with the smallest replica. What its checkpoints
    ask for stays: whether the ranks shard the optimizer's states.
    """
    for count in range(_count(slots), 0, -1):
        taken = first_slots(slots, count)
        tried = (assess(one, taken, source, assumptions) for one in _candidates(experiment, taken))
        fitting = [assessment for assessment in tried if _runs(assessment, force)]
        if fitting:
            return min(fitting, key=_rank)
    return None


def first_slots(slots: Slots, count: int) -> dict[str, tuple[int, ...]]:
    """The first ``count`` slots, node by node."""
    taken: dict[str, tuple[int, ...]] = {}
    for node, numbers in slots.items():
        if own := tuple(numbers)[: count - _count(taken)]:
            taken[node] = own
    return taken


def _count(slots: Slots) -> int:
    return sum(map(len, slots.values()))


def _runs(assessment: Assessment, force: bool) -> bool:
    return assessment.verdict in ("fits", "tight") or (force and assessment.verdict == "no-fit")


def _candidates(experiment: Experiment, slots: Slots) -> Iterator[Experiment]:
    """None of which has tensor parallel groups that cross nodes: those would be slower than any other layout."""
    smallest = min(map(len, slots.values()))
    for choice in layouts(experiment, _count(slots)):
        update = {path.removeprefix("parallel."): value for path, value in choice.items()}
        parallel = experiment.parallel.model_copy(update=update)
        if parallel.use_distributed_optimizer != experiment.parallel.use_distributed_optimizer:
            continue
        if smallest % parallel.tensor_model_parallel_size == 0:
            yield experiment.model_copy(update={"parallel": parallel})


def _rank(assessment: Assessment) -> tuple[float, int]:
    cost = assessment.cost
    seconds = cost.estimate.iteration if cost is not None and cost.estimate is not None else math.inf
    return seconds, size_of_replica(assessment.experiment)
