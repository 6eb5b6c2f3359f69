"""Lengths counted by size, beside numpy's own arithmetic."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tridock.data.dataset.inspect import Bar, Lengths

SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=20), max_size=5))
@example([[0, 1, 2, 3, 2**31 - 1]])
def test_the_arithmetic_is_numpys(blocks: list[list[int]]) -> None:
    lengths = Lengths(np.array(block, np.int64) for block in blocks)
    everything = np.array([length for block in blocks for length in block], np.int64)
    assert (lengths.count, lengths.total) == (len(everything), int(everything.sum()))
    assert sum(bar.count for bar in lengths.bars()) == lengths.count
    if not len(everything):
        assert ([lengths.quantile(share) for share in SHARES], lengths.mean, lengths.bars()) == ([0] * 5, 0, [])
        return
    assert (lengths.min, lengths.max) == (everything.min(), everything.max())
    assert np.isclose(lengths.mean, everything.mean())
    for share in SHARES:
        assert lengths.quantile(share) == int(np.quantile(everything, share, method="inverted_cdf"))
    for bar in lengths.bars():
        assert bar.count == int(((everything >= bar.first) & (everything <= bar.last)).sum())


def test_bars_are_powers_of_two_without_gaps() -> None:
    some = np.array([1, 4, 7], np.int32)
    assert Lengths([some]).bars() == [Bar(1, 1, 1), Bar(2, 3, 0), Bar(4, 7, 2)]
    assert Lengths([some, np.zeros(2, np.int32)]).bars()[0] == Bar(0, 0, 2)
