"""What an experiment becomes on a cluster: world size, batch arithmetic, rank map, legality. Pure."""

from tridock.plan.plan import Plan, Rank, make_plan

__all__ = ["Plan", "Rank", "make_plan"]
