"""Messages from a node's agent to the supervisor of a run, one line of JSON each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tridock.contracts.node_answers import Space, Stopped

NODE_SILENCE_S: Final = 20.0
"""Seconds of silence after which the supervisor counts a node as lost, and an agent its head."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """An agent's view of one rank; times in seconds before the report."""

    rank: int
    phase: str
    iteration: int
    heartbeats: int
    code: int
    """The exit code with which a failed rank is about to exit."""
    age_s: float
    """Seconds since its last heartbeat, or since it last read or wrote much while it starts or saves."""
    alive: bool
    gone_s: float = 0.0
    """Seconds since its end, by its record; without one, since it was first seen dead."""
    wait_status: int | None = None
    """Its wait status as in wait(2); None if nobody saw it."""
    stopped_s: float = 0.0
    """Seconds since it was first seen stopped by a signal or a debugger."""
    killed_for_memory: bool = False
    """Whether the OOM killer has acted on its node since the attempt's start."""
    world_size: int = 0
    """In a run of your own program: the number of ranks in its world, by its environment; 0 if that does not say."""
    inner_world_size: int = 0
    """The same of a process that it started and that is a rank of another world; 0 without one."""
    steps: int = 0
    """The number of steps after its first one that it has measured."""
    longest_step_s: float = 0.0
    """The longest of its last steps."""


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """How often a network interface or InfiniBand port (``DEVICE:PORT``) went down."""

    name: str
    downs: int


@dataclass(frozen=True, slots=True)
class LockReport:
    """Which devices a node has locked for the run."""

    domain: str
    """Where the locks hold: the host and its network namespace; empty without devices."""
    missing: tuple[str, ...]
    """The devices that it has not locked: those that another run has, or all."""
    turn: int
    """The number of the supervisor's last order about them; 0 for none."""


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """One message: the status of the ranks, the answer to an order, or nothing but that the node is alive."""

    ranks: tuple[RankStatus, ...] | None = None
    disk: Space | None = None
    """Sent with the ranks: the node's disk that holds the run's folder; None if it is the head's disk."""
    stacks: Mapping[int, tuple[str, ...]] | None = None
    """Frames of each rank's main thread as ``file:line in function``, innermost first."""
    build_locks: Mapping[int, str] = field(default_factory=dict)
    """Sent with the stacks: the lock of torch's extension builder that a rank waits for and no process holds."""
    stopped: Stopped | None = None
    removed: tuple[str, ...] = ()
    """Sent with ``stopped`` or the ranks: files that killed processes had left, since the last message with these."""
    stop_asked: bool = False
    """Sent with the ranks: whether a user has stopped the run here since the agent began."""
    missed_launch: int = 0
    """Sent with the ranks: the launch, by its number in the supervisor's pings, that is older than the agent's
    container: a container that starts again has none of its ranks. 0 for none."""
    memory_kills: int = 0
    """Sent with the ranks: how many processes the kernel has killed for memory there since the attempt's start."""
    links: tuple[LinkFaults, ...] = ()
    """Sent with the ranks: the node's links that went down since the attempt's start."""
    locks: LockReport | None = None
    """Sent with the ranks."""
    clock_s: float = 0.0
    """Sent with the ranks: the node's clock, in seconds since the epoch."""
