"""The index of samples that numpy makes is upstream's, document for document."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from tridock.compat.megatron_v115 import build_sample_idx


def one_by_one(lengths: list[int], seq_length: int) -> list[tuple[int, int]]:
    """A sample begins at every ``seq_length``-th token of the documents in order."""
    tokens = [(place, offset) for place, length in enumerate(lengths) for offset in range(length)]
    samples = (len(tokens) - 1) // seq_length
    return [(0, 0)] + [tokens[number * seq_length] for number in range(1, samples + 1)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 7), st.randoms())
def test_every_sample_begins_where_upstreams_does(sizes, epochs, seq_length, random) -> None:
    if sum(sizes) == 0:
        return
    documents = [number for _ in range(epochs) for number in range(len(sizes))]
    random.shuffle(documents)
    found = build_sample_idx(
        np.array(sizes, np.int32), np.array(documents, np.int32), seq_length, epochs, np.int64(sum(sizes))
    )
    assert found.dtype == np.int32
    assert [tuple(row) for row in found.tolist()] == one_by_one([sizes[number] for number in documents], seq_length)
