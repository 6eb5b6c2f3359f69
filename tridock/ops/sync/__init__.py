"""Copies data to the hosts by hash, so that each workspace matches the operator's project folder."""

from tridock.ops.sync.files import Chosen, choose, of_experiment
from tridock.ops.sync.operation import Row, Synced, sync

__all__ = ["Chosen", "Row", "Synced", "choose", "of_experiment", "sync"]
