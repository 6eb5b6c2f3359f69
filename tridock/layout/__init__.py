"""Layout arithmetic that all engines share: rank map, groups, shape of a stage, nearest legal sizes. Pure."""

from tridock.layout.plan import Plan, Rank, Slots

__all__ = ["Plan", "Rank", "Slots"]
