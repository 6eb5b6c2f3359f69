"""The communication groups of a plan, and which of them cross nodes. Pure."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tridock.errors import Problem
from tridock.layout.plan import Plan, Rank

_OfModel = Literal["tensor", "context", "data", "data_with_context", "pipeline", "pipeline_neighbours", "embedding"]
Kind = Literal[_OfModel, "model", "expert", "expert_tensor", "expert_data"]
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The communication groups of a plan.

    ``members`` holds the groups of every kind, ordered by their first ranks; a group's ranks ascend. Every rank is in
    one group of each kind (including groups of one rank, as the engines make them), except ``pipeline_neighbours`` and
    ``embedding``:

    - ``tensor``: ranks that split every layer. ``context``: ranks that split a sample's tokens. ``data``: ranks with
      the same part of the model and other samples; ``data_with_context``: ranks with the same part of the model, over
      which megatron-core sums gradients.
    - ``pipeline``: the stages of a pipeline; ``pipeline_neighbours``: pairs of ranks that send activations forward and
      gradients back, including the last stage and the first if the pipeline is interleaved.
    - ``embedding``: the first and the last stage of a pipeline, which sum the gradients of the tied embedding.
    - ``expert``: ranks that divide a layer's experts, ``expert_tensor``: ranks that split one expert; ``expert_data``:
      ranks with the same experts and other samples. A plan without a mixture of experts has none of these.
    - ``model``: all ranks that hold a part of one copy of the model and the same tokens (tensor x pipeline).

    ``nodes`` is the node of each rank.
    """

    members: Mapping[Kind, tuple[Group, ...]]
    nodes: tuple[str, ...]

    def nodes_of(self, group: Group) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.nodes[rank] for rank in group))

    def spans(self, kind: Kind) -> list[int]:
        """Returns the number of nodes of each group of a kind."""
        node = self.nodes.__getitem__
        return [len(set(map(node, group))) for group in self.members[kind]]

    def crossing(self, kind: Kind) -> tuple[Group, ...]:
        """Returns the groups of a kind that have ranks on more than one node."""
        return tuple(group for group, nodes in zip(self.members[kind], self.spans(kind), strict=True) if nodes > 1)


def make_groups(plan: Plan) -> Groups:
    """Returns the groups of a plan, as its engine makes them. The time grows linearly with the number of ranks."""
    pipelines = _alike(plan, lambda r: (r.data_parallel_rank, r.context_parallel_rank, r.tensor_parallel_rank))
    interleaved = plan.virtual_pipeline_model_parallel_size > 1
    members: dict[Kind, tuple[Group, ...]] = {
        "tensor": _alike(plan, lambda r: (r.pipeline_parallel_rank, r.data_parallel_rank, r.context_parallel_rank)),
        "context": _alike(plan, lambda r: (r.pipeline_parallel_rank, r.data_parallel_rank, r.tensor_parallel_rank)),
        "data": _alike(plan, lambda r: (r.pipeline_parallel_rank, r.context_parallel_rank, r.tensor_parallel_rank)),
        "data_with_context": _alike(plan, lambda r: (r.pipeline_parallel_rank, r.tensor_parallel_rank)),
        "pipeline": pipelines,
        "pipeline_neighbours": tuple(pair for stages in pipelines for pair in _neighbours(stages, interleaved)),
        "embedding": tuple(stages[:1] + stages[1:][-1:] for stages in pipelines),
        "model": _alike(plan, lambda r: (r.data_parallel_rank, r.context_parallel_rank)),
    }
    if plan.expert_tensor_parallel_size:
        members |= _expert_groups(plan)
    return Groups(members, tuple(rank.node for rank in plan.ranks))


def _expert_groups(plan: Plan) -> dict[Kind, tuple[Group, ...]]:
    """Returns the groups in megatron-core's order: ranks of one expert are neighbours, then those of other experts."""
    tensor = plan.expert_tensor_parallel_size
    covered = tensor * plan.expert_model_parallel_size
    return {
        "expert": _alike(plan, lambda r: (r.rank // covered, r.rank % tensor)),
        "expert_tensor": _alike(plan, lambda r: r.rank // tensor),
        "expert_data": _alike(plan, lambda r: (r.pipeline_parallel_rank, r.rank % covered)),
    }


def warnings(plan: Plan) -> list[str]:
    """Returns what makes a legal plan slow: groups that communicate in every layer and cross nodes, with a remedy.

    Each reads as a :class:`Problem` does. A suggested size divides the size in use, and therefore the heads and the
    world too.
    """
    return [str(problem) for problem in _crossing_problems(plan, make_groups(plan))]


def _alike(plan: Plan, place: Callable[[Rank], Hashable]) -> tuple[Group, ...]:
    """Groups the ranks by ``place``. The plan's ranks ascend, and so do the groups and their ranks."""
    found: dict[Hashable, list[int]] = {}
    for rank in plan.ranks:
        found.setdefault(place(rank), []).append(rank.rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _neighbours(stages: Group, interleaved: bool) -> Iterator[Group]:
    yield from itertools.pairwise(stages)
    if interleaved and len(stages) > 2:  # with two stages, the wrap-around pair is the same pair
        yield stages[0], stages[-1]


def _crossing_problems(plan: Plan, groups: Groups) -> Iterator[Problem]:
    """Yields tensor and context parallel groups that cross nodes, each with the largest size that does not.

    Ranks of a tensor parallel group are neighbours; ranks of a context parallel group are a tensor parallel size apart.
    Neither crosses a node if every node begins at a multiple of tensor x context.
    """
    begins = [rank.rank for rank in plan.ranks if rank.local_rank == 0]  # the first rank of every node
    tensor, context = plan.tensor_model_parallel_size, plan.context_parallel_size
    fitting = _greatest_divisor(tensor, lambda size: all(first % size == 0 for first in begins))
    if crossing := groups.crossing("tensor"):
        yield Problem(
            "parallel.tensor_model_parallel_size",
            f"{len(crossing)} of {len(groups.members['tensor'])} tensor parallel groups cross nodes"
            f" ({_places(groups, crossing)}), and every layer waits for the network",
            str(tensor),
            f"use {fitting}, whose groups stay within a node's slots",
        )
    if crossing := groups.crossing("context"):
        size = _greatest_divisor(context, lambda size: all(first % (fitting * size) == 0 for first in begins))
        given = "" if fitting == tensor else f" with tensor_model_parallel_size {fitting}"
        yield Problem(
            "parallel.context_parallel_size",
            f"{len(crossing)} of {len(groups.members['context'])} context parallel groups cross nodes"
            f" ({_places(groups, crossing)}), and every layer's attention waits for the network",
            str(context),
            f"use {size}{given}, whose groups stay within a node's slots",
        )


def _greatest_divisor(number: int, fits: Callable[[int], bool]) -> int:
    return max(size for size in range(1, number + 1) if number % size == 0 and fits(size))


def _places(groups: Groups, crossing: Iterable[Group], shown: int = 3) -> str:
    """Returns ``a + b, c + d and 6 more``: the sets of nodes that the groups span."""
    places = list(dict.fromkeys(" + ".join(groups.nodes_of(group)) for group in crossing))
    more = f" and {len(places) - shown} more" if len(places) > shown else ""
    return ", ".join(places[:shown]) + more
