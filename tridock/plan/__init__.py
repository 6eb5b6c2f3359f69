"""What an experiment becomes on a cluster: legality, rank map, memory, cost, and the search for a better one. Pure."""

from tridock.plan.assess import Assessment, Assumptions, assess
from tridock.plan.plan import Plan, Rank

__all__ = ["Assessment", "Assumptions", "Plan", "Rank", "assess"]
