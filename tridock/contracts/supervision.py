"""What the supervisor has to know of a run, as data in its folder: who runs where, and what to do when one fails."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

from tridock.contracts.codec import decode, form_digest
from tridock.contracts.node_answers import PROTOCOL
from tridock.contracts.sinks import Notification, Tracker


@dataclass(frozen=True, slots=True)
class Reach:
    """How the supervisor runs ``python -m tridock.node …`` on another node."""

    argv: tuple[str, ...] = ()
    """The command before that one; ``{node}`` stands for the node's name."""
    python: str | None = None
    """The interpreter there; None is the supervisor's own."""
    as_one_argument: bool = False
    """Whether the rest goes as one argument, to a shell there."""
    first_answer_s: float = 0.0
    """Further seconds that a node's first answer may take."""

    def command(self, node: str, *arguments: str) -> list[str]:
        """The argv that runs ``tridock.node`` with ``arguments`` on the node."""
        return self.program(node, self.python or sys.executable, "-P", "-m", "tridock.node", *arguments)

    def program(self, node: str, *command: str) -> list[str]:
        """The argv that runs any command on the node."""
        return [
            *(argument.replace("{node}", node) for argument in self.argv),
            *([shlex.join(command)] if self.as_one_argument else command),
        ]


@dataclass(frozen=True, slots=True)
class Supervision:
    """``supervision.json``."""

    head: str
    """The node whose supervisor this is for."""
    ranks: Mapping[str, tuple[int, ...]]
    """Every node's ranks."""
    remote: tuple[str, ...]
    """The nodes that are watched from afar; those that were started by hand are not among them."""
    master_port: int
    """Where the ranks meet, on the head."""
    hang_timeout_s: float
    """Seconds without progress after which a rank counts as hung; 0 for never."""
    max_restarts: int = 0
    restart_window_s: float | None = None
    """The time in which so many restarts may be made; None for the whole run."""
    checkpoints: str | None = None
    """The folder of this run's checkpoints; None where it writes none."""
    node_timeout_s: float = 60.0
    """Seconds that a lost node has to come back before the run continues without it."""
    min_nodes: int = 1
    """The fewest nodes with which the run may continue."""
    spares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Nodes that may take the place of a lost one, with their slot numbers."""
    master_addr: str = "127.0.0.1"
    """The head, as the other nodes reach it."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Every node as the others reach it, spares too; a node that is missing here is reached by its name."""
    launcher: str = "local"
    """What started the ranks: a name of ``tridock.launchers``."""
    reach: Reach = Reach()
    scheduler: str | None = None
    """Who replaces a lost node, and ends the job for that; None where the run continues on spares or fewer nodes."""
    on_head: bool = True
    """Whether the supervisor runs on the head; from a login node that is watched from afar too."""
    metrics: str = ""
    """What finds figures in the output of a program that logs none (``tridock.contracts.output_metrics``)."""
    save_signal: str = "SIGUSR1"
    """What the ranks of the user's own program get when the time of their job is over."""
    observed: bool = False
    """Whether the ranks are the user's own program: found among the run's processes, for want of heartbeats."""
    begun: float | None = None
    """When the run was first prepared (a file's time), where that is not when this file was written: a job of Slurm's
    that was requeued continues from checkpoints that it wrote before."""

    trackers: tuple[Tracker, ...] = ()
    notify: tuple[Notification, ...] = ()

    @property
    def watched(self) -> tuple[str, ...]:
        """The nodes that the supervisor watches."""
        return (self.head, *self.remote) if self.on_head else self.remote

    @property
    def may_be_taken_over(self) -> bool:
        """Whether another node may supervise the run if the head is gone: one that restarts by itself after a failure.

        Scheduled jobs are queued again. The user's own program was given the head's address at its start.
        """
        return bool(self.max_restarts and self.remote and self.on_head) and not (self.scheduler or self.observed)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        return decode(cls, text)


def contract() -> str:
    """What an operator and a head must have in common for one to start the other's run: the nodes' protocol, and the
    form of ``supervision.json``."""
    return f"{PROTOCOL}-{form_digest(Supervision)}"


@dataclass(frozen=True, slots=True)
class NewLayout:
    """``tridock replan --json``: how a run continues after it loses nodes, and its new files."""

    summary: str
    layout: str
    world_size: int
    nodes: tuple[str, ...]
    files: Mapping[str, str]
