"""The choices next to one that cannot be."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All of them, the least first."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def around(choices: Iterable[int], wanted: int) -> tuple[int, ...]:
    """The choices next to ``wanted``: the greatest below it and the least above it, as far as there are any."""
    ordered = sorted(choices)
    below = [choice for choice in ordered if choice < wanted]
    above = [choice for choice in ordered if choice > wanted]
    return (*below[-1:], *above[:1])


def nearest_divisors(number: int, wanted: int, multiple_of: int = 1) -> tuple[int, ...]:
    """The divisors of ``number`` next to ``wanted``, where there are any only those that ``multiple_of`` divides."""
    found = divisors(number)
    return around([d for d in found if d % multiple_of == 0], wanted) or around(found, wanted)


def nearest_multiples(number: int, wanted: int) -> tuple[int, ...]:
    """The multiples of ``number`` next to ``wanted``: the greatest below it, if any, and the least above it."""
    below = wanted // number * number
    return (below, below + number) if below else (number,)


def nearest_multiple(number: int, wanted: int) -> int:
    """The one of them that is nearer; the greater where both are as near."""
    return min(nearest_multiples(number, wanted), key=lambda multiple: (abs(multiple - wanted), -multiple))


def either(choices: Iterable[int | str]) -> str:
    """``2 or 4``."""
    return " or ".join(str(choice) for choice in choices)
