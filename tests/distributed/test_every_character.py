"""The fast encoder against the reference over every character there is. Here, being too long for a unit test."""

import pytest

from tests.unit.data.test_encoders import assert_same, beside_others, fast, other, reference, surrogate  # noqa: F401
from tridock.data.tokenize.encoders import Fast, Reference

pytestmark = [pytest.mark.distributed, pytest.mark.full]  # tests/unit/data/test_encoders.py: some of them

BLOCK = 8192


@pytest.mark.parametrize("plane", range(0x11))
def test_fast_over_every_character(plane: int, fast: Fast, reference: Reference) -> None:  # noqa: F811
    first = plane << 16
    # The private planes are alike throughout.
    step = 1 if plane in (0, 1, 2, 3, 14) else 64
    chosen = [chr(code) for code in range(first, first + 0x10000, step) if not surrogate(code)]
    for start in range(0, len(chosen), BLOCK):
        assert_same(fast, reference, beside_others(chosen[start : start + BLOCK]))


@pytest.mark.parametrize("plane", [0, 1])
def test_the_splits_of_other_models_over_every_character(plane: int, other: Reference) -> None:  # noqa: F811
    pytest.importorskip("gigatoken")
    encoder, chosen = Fast(other), [chr(code) for code in range(plane << 16, (plane + 1) << 16) if not surrogate(code)]
    for start in range(0, len(chosen), BLOCK):
        assert_same(encoder, other, beside_others(chosen[start : start + BLOCK]))
