"""What a node's agent reports to the supervisor of a run, a line of JSON each."""

from collections.abc import Mapping
from dataclasses import dataclass

from tridock.contracts.node_answers import Space, Stopped


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What an agent sees of one rank; times in seconds, as of the moment of the report."""

    rank: int
    phase: str
    iteration: int
    heartbeats: int
    code: int
    """The exit code that the rank is about to leave with, once it has failed."""
    age_s: float
    """Since its last heartbeat."""
    alive: bool
    gone_s: float = 0.0
    """Since it was seen dead."""
    wait_status: int | None = None
    """How it ended, as wait(2) has it; None if nobody saw."""
    stopped_s: float = 0.0
    """Since it was seen stopped by a signal or a debugger."""
    killed_for_memory: bool = False
    """Whether the kernel has killed for memory on its node since the agent started."""


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """One line: the status of the ranks, or the answer to an order."""

    ranks: tuple[RankStatus, ...] | None = None
    disk: Space | None = None
    """With the ranks: the node's own disk with the run's folder; None where that is the head's."""
    stacks: Mapping[int, tuple[str, ...]] | None = None
    """The frames of each rank's main thread as ``file:line in function``, the innermost first."""
    stopped: Stopped | None = None
