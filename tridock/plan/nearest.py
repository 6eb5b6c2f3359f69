"""The choices next to one that cannot be."""

from __future__ import annotations


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of ``number`` next to ``wanted``: the greatest below it and the least above it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def nearest_multiples(number: int, wanted: int) -> list[int]:
    """The multiples of ``number`` next to ``wanted``: the greatest below it, if any, and the least above it."""
    below = wanted // number * number
    return [below, below + number] if below else [number]


def either(choices: list[int]) -> str:
    """``2 or 4``."""
    return " or ".join(str(choice) for choice in choices)
