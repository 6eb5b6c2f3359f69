"""Data to the hosts: each one's workspace holds what the operator's project folder holds, by hash."""

from tridock.ops.sync.files import Chosen, choose, of_experiment
from tridock.ops.sync.operation import Row, Synced, sync

__all__ = ["Chosen", "Row", "Synced", "choose", "of_experiment", "sync"]
