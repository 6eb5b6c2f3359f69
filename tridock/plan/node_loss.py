"""How a run continues after a node loss: with fewer data parallel replicas, or (megatron-core) on another layout.

The global batch, the micro batch and the optimizer stay: a replica processes more micro batches, and the mathematics of
the run is unchanged.
"""

import math
from collections.abc import Iterator

from tridock.engines import program_of
from tridock.experiment import Experiment
from tridock.layout.plan import Slots, size_of_world, slots_per_node
from tridock.layout.split import size_of_replica
from tridock.plan.assess import Assessment, assess
from tridock.plan.assumptions import Assumptions
from tridock.plan.search import layouts


def continuing_layout(
    experiment: Experiment, slots: Slots, source: str, assumptions: Assumptions, *, force: bool = False
) -> Assessment | None:
    """Returns as :func:`fewer_replicas` does; if not even one fits, and the program's checkpoints load on any layout,
    as :func:`other_layout` does."""
    found = fewer_replicas(experiment, slots, source, assumptions, force=force)
    if found is None and program_of(experiment).checkpoints_load_on == "any layout":
        return other_layout(experiment, slots, source, assumptions, force=force)
    return found


def fewer_replicas(
    experiment: Experiment, slots: Slots, source: str, assumptions: Assumptions, *, force: bool = False
) -> Assessment | None:
    """Returns as many unchanged replicas as ``slots`` and the global batch allow; None if not even one fits.

    ``slots`` are in the order of the ranks; the last stay unused. ``force`` ignores the GPU's memory.
    """
    size = size_of_replica(experiment)
    for replicas in range(size_of_world(slots) // size, 0, -1):
        assessment = assess(experiment, first_slots(slots, replicas * size), source, assumptions)
        if _runs(assessment, force):
            return assessment
    return None


def other_layout(
    experiment: Experiment, slots: Slots, source: str, assumptions: Assumptions, *, force: bool = False
) -> Assessment | None:
    """megatron-core: returns the best layout on the most ``slots`` that have a legal one; None if there is no layout.

    Layouts are ordered by estimated time, or without an estimate by replica size, the smallest first. What the
    checkpoints require is kept: whether the ranks shard the optimizer states.
    """
    for count in range(size_of_world(slots), 0, -1):
        taken = first_slots(slots, count)
        tried = (assess(one, taken, source, assumptions) for one in _candidates(experiment, taken))
        fitting = [assessment for assessment in tried if _runs(assessment, force)]
        if fitting:
            return min(fitting, key=_rank)
    return None


def first_slots(slots: Slots, count: int) -> dict[str, tuple[int, ...]]:
    """Returns the first ``count`` slots, node by node."""
    taken: dict[str, tuple[int, ...]] = {}
    for node, numbers in slots.items():
        if own := tuple(numbers)[: count - size_of_world(taken)]:
            taken[node] = own
    return taken


def _runs(assessment: Assessment, force: bool) -> bool:
    return assessment.verdict in ("fits", "tight") or (force and assessment.verdict == "no-fit")


def _candidates(experiment: Experiment, slots: Slots) -> Iterator[Experiment]:
    """Yields layouts whose tensor parallel groups do not cross nodes: such groups would be slower than all others."""
    smallest = slots_per_node(slots)
    for choice in layouts(experiment, size_of_world(slots)):
        other = experiment.with_fields(choice)
        if other.parallel.use_distributed_optimizer != experiment.parallel.use_distributed_optimizer:
            continue
        if smallest % other.parallel.tensor_model_parallel_size == 0:
            yield other


def _rank(assessment: Assessment) -> tuple[float, int]:
    seconds = math.inf if assessment.seconds is None else assessment.seconds
    return seconds, size_of_replica(assessment.experiment)
