"""Upper limits beyond any real cluster: a larger request is a typing error, refused before it fills memory."""

from collections.abc import Mapping, Sequence
from typing import Final

from tridock.errors import Problem, RequestError

MOST_SLOTS: Final = 4096
"""Per node."""
MOST_RANKS: Final = 2**16
"""Per run."""
LEAST_RATE: Final = 1e-3
MOST_RATE: Final = 1e6
"""For a network in Gbit/s and a GPU in TFLOP/s."""


def refuse_too_many(slots: Mapping[str, Sequence[int]], where: str, todo: str) -> None:
    """Raises :class:`RequestError` for more slots than :data:`MOST_RANKS`; ``todo`` says how to exclude some."""
    if (number := sum(map(len, slots.values()))) > MOST_RANKS:
        raise RequestError(Problem(where, f"has more slots than the {MOST_RANKS:,} of a run", f"{number:,}", todo))
