"""Which groups cross nodes, and what is said of it."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.layouts import laid_out
from tridock.layout.groups import make_groups, warnings

TP, CP = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"
FORM = re.compile(r"(?P<where>.+?): (?P<what>.+?); (?:got (?P<got>.+); )?(?P<todo>[^;]+)")
STAYS = "whose groups stay within a node's slots"


def test_the_groups_of_a_small_plan() -> None:
    groups = make_groups(laid_out(2, 3, 2, slots=[8, 4]))
    assert groups.members == {
        "tensor": ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)),
        "context": ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)),
        "data": tuple((rank,) for rank in range(12)),
        "data_with_context": ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11)),
        "pipeline": ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)),
        "pipeline_neighbours": ((0, 4), (4, 8), (1, 5), (5, 9), (2, 6), (6, 10), (3, 7), (7, 11)),
        "embedding": ((0, 8), (1, 9), (2, 10), (3, 11)),
        "model": ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)),
    }
    assert groups.nodes == ("n0",) * 8 + ("n1",) * 4
    assert groups.nodes_of((0, 4, 8)) == ("n0", "n1")
    assert groups.crossing("pipeline_neighbours") == ((4, 8), (5, 9), (6, 10), (7, 11))
    assert [max(groups.spans(kind)) for kind in ("tensor", "pipeline", "embedding")] == [1, 2, 2]


def test_pipelines_within_nodes() -> None:
    """As PyTorch's data parallel benchmark: 4 nodes of 8 GPUs, 16 pipelines of two GPUs."""
    apart, within = (
        make_groups(laid_out(stages=2, data=16, slots=[8] * 4, stages_are_neighbours=mapping))
        for mapping in (False, True)
    )
    assert len(apart.crossing("pipeline")) == 16
    assert within.crossing("pipeline") == within.crossing("embedding") == ()
    assert within.members["pipeline"][:2] == ((0, 1), (2, 3))
    assert within.members["data"] == (tuple(range(0, 32, 2)), tuple(range(1, 32, 2)))


@pytest.mark.parametrize(("stages", "pairs"), [(1, ()), (2, ((0, 1),)), (3, ((0, 1), (1, 2), (0, 2)))])
def test_an_interleaved_pipeline_goes_round(stages: int, pairs: tuple[tuple[int, int], ...]) -> None:
    groups = make_groups(laid_out(stages=stages, virtual=2 if stages > 1 else 1))
    assert groups.members["pipeline_neighbours"] == pairs
    assert max(groups.spans("pipeline_neighbours"), default=0) == (1 if pairs else 0)


@pytest.mark.parametrize(
    ("sizes", "slots", "expected"),
    [
        ((8, 1, 1, 4), [4] * 8,
         [f"{TP}: 4 of 4 tensor parallel groups cross nodes (n0 + n1, n2 + n3, n4 + n5 and 1 more), "
          f"and every layer waits for the network; got 8; use 4, {STAYS}"]),
        ((8, 2, 1, 1), [6, 6, 4],
         [f"{TP}: 2 of 2 tensor parallel groups cross nodes (n0 + n1, n1 + n2), "
          f"and every layer waits for the network; got 8; use 2, {STAYS}"]),
        ((2, 2, 1, 2), [3, 3, 2],
         [f"{TP}: 1 of 4 tensor parallel groups cross nodes (n0 + n1), "
          f"and every layer waits for the network; got 2; use 1, {STAYS}"]),
        ((2, 1, 2, 2), [4, 2, 2],
         [f"{CP}: 2 of 4 context parallel groups cross nodes (n1 + n2), "
          f"and every layer's attention waits for the network; got 2; use 1, {STAYS}"]),
        ((1, 1, 4, 2), [2] * 4,
         [f"{CP}: 2 of 2 context parallel groups cross nodes (n0 + n1, n2 + n3), "
          f"and every layer's attention waits for the network; got 4; use 2, {STAYS}"]),
        ((8, 1, 2, 1), [4] * 4,
         [f"{TP}: 2 of 2 tensor parallel groups cross nodes (n0 + n1, n2 + n3), "
          f"and every layer waits for the network; got 8; use 4, {STAYS}",
          f"{CP}: 8 of 8 context parallel groups cross nodes (n0 + n2, n1 + n3), "
          "and every layer's attention waits for the network; got 2; "
          f"use 1 with tensor_model_parallel_size 4, {STAYS}"]),
    ],
)  # fmt: skip
def test_warnings(sizes: tuple[int, int, int, int], slots: Sequence[int], expected: list[str]) -> None:
    found = warnings(laid_out(*sizes, slots=slots))
    assert found == expected
    assert all(FORM.fullmatch(warning) for warning in found)


@pytest.mark.parametrize("slots", [[8], [4, 4], [4, 2, 2], [2, 2, 2, 2]])
def test_pipelines_and_replicas_may_cross_nodes_silently(slots: Sequence[int]) -> None:
    assert warnings(laid_out(2, 2, 1, 2, slots=slots)) == []


@given(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.integers(1, 3)),
    st.data(),
)
def test_what_is_advised_crosses_nothing_and_nothing_greater_would_do(
    sizes: tuple[int, int, int, int], draw: st.DataObject
) -> None:
    tensor, stages, context, data = sizes
    world = tensor * stages * context * data
    cuts = sorted(draw.draw(st.sets(st.integers(1, max(1, world - 1)), max_size=4)) - {world})
    slots = [end - begin for begin, end in zip([0, *cuts], [*cuts, world], strict=True)]
    found = warnings(laid_out(*sizes, slots=slots))
    parts = [match for match in map(FORM.fullmatch, found) if match is not None]
    advised = {match["where"]: int(match["todo"].split()[1].rstrip(",")) for match in parts}
    nodes = [node for node, count in enumerate(slots) for _ in range(count)]

    def crosses(tensor: int, context: int) -> tuple[bool, bool]:
        tensors = [nodes[first : first + tensor] for first in range(0, world, tensor)]
        covered = tensor * context
        contexts = [
            nodes[first + place : first + covered : tensor]
            for first in range(0, world, covered)
            for place in range(tensor)
        ]
        return any(len(set(group)) > 1 for group in tensors), any(len(set(group)) > 1 for group in contexts)

    split_tensor, split_context = crosses(tensor, context)
    assert (TP in advised, CP in advised) == (split_tensor, split_context)
    fitting = advised.get(TP, tensor)
    assert not crosses(fitting, 1)[0]
    assert not crosses(fitting, advised.get(CP, 1))[1]
    better = [size for size in range(fitting + 1, tensor + 1) if tensor % size == 0]
    assert all(crosses(size, 1)[0] for size in better)
    if CP in advised:
        better = [size for size in range(advised[CP] + 1, context + 1) if context % size == 0]
        assert all(crosses(fitting, size)[1] for size in better)


def test_a_thousand_ranks() -> None:
    plan = laid_out(8, 16, 1, 8, slots=[8] * 128)
    assert max(make_groups(plan).spans("data")) == 8
    assert warnings(plan) == []
