"""Plans an experiment on a cluster: legality, rank map, memory, cost, and the search for a better layout. Pure."""

from tridock.layout.plan import Plan, Rank
from tridock.plan.assess import Assessment, assess
from tridock.plan.assumptions import Assumptions

__all__ = ["Assessment", "Assumptions", "Plan", "Rank", "assess"]
