"""``supervision.json``, the supervisor's view of a run: where each rank runs, and what to do when one fails."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from tridock.contracts import run_folder
from tridock.contracts.codec import JSON_VERSION, decode, schema_digest
from tridock.contracts.hang_limits import described
from tridock.contracts.node_answers import PROTOCOL
from tridock.contracts.trackers import Notification, Tracker


@dataclass(frozen=True, slots=True)
class Reach:
    """The way the supervisor runs ``python -m tridock.node …`` on another node."""

    argv: tuple[str, ...] = ()
    """Command prefix; ``{node}`` stands for the node's name."""
    python: str | None = None
    """The interpreter on the node; None means the supervisor's own."""
    as_one_argument: bool = False
    """Whether the rest is passed as one argument to a shell on the node."""

    def command(self, node: str, *arguments: str) -> list[str]:
        """Returns the argv that runs ``tridock.node`` with ``arguments`` on the node."""
        return self.program(node, self.python or sys.executable, "-P", "-m", "tridock.node", *arguments)

    def program(self, node: str, *command: str) -> list[str]:
        """Returns the argv that runs any command on the node."""
        return [
            *(argument.replace("{node}", node) for argument in self.argv),
            *([shlex.join(command)] if self.as_one_argument else command),
        ]


@dataclass(frozen=True, slots=True)
class Supervision:
    """``supervision.json``."""

    head: str
    """The node on which the supervisor runs."""
    ranks: Mapping[str, tuple[int, ...]]
    """The ranks of every node."""
    remote: tuple[str, ...]
    """The nodes that are watched remotely; excludes those started by hand."""
    master_port: int
    """Rendezvous port on the head."""
    hang_timeout_s: float
    """Seconds without progress after which a rank counts as hung; 0 means never."""
    max_restarts: int = 0
    restart_window_s: float | None = None
    """The time window for that number of restarts; None means the entire run."""
    checkpoints: str | None = None
    """The folder of this run's checkpoints; None if it writes none."""
    node_timeout_s: float = 60.0
    """Seconds to wait for a lost node before the run continues without it."""
    min_nodes: int = 1
    """The minimum number of nodes with which the run may continue."""
    spares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Nodes that may replace a lost one, with their slot numbers."""
    master_addr: str = "127.0.0.1"
    """The head's address for the other nodes."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Every node's address for the others, spares included; a node not listed is reached by its name."""
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The devices that the run locks on each node's host, spares included; empty where others may use them, too."""
    queued: bool = False
    """Whether the run was queued: then it waits without limit for devices that another run has locked."""
    launcher: str = "local"
    """The launcher that started the ranks: a name in ``tridock.launchers``."""
    reach: Reach = Reach()
    scheduler: str | None = None
    """The scheduler that replaces a lost node by ending the job; None if the run continues on spares or fewer nodes."""
    on_head: bool = True
    """Whether the supervisor runs on the head. A supervisor on a login node watches the head remotely too."""
    metrics: str = ""
    """Pattern that extracts metrics from the program's output (``tridock.contracts.output_metrics``)."""
    save_signal: str = "SIGUSR1"
    """The signal for the ranks of your own program when the job's time is up."""
    observed: bool = False
    """Whether the ranks run your own program without heartbeats, and are found among the run's processes."""
    per_slot: bool = False
    """Whether such a program was started once per slot."""
    prepared_at: float | None = None
    """When the run was first prepared (a file's time), if earlier than this file: a requeued Slurm job resumes from
    checkpoints that it wrote before."""

    planned_step_s: float | None = None
    """The plan's estimate of a step, in seconds; None without one."""

    trackers: tuple[Tracker, ...] = ()
    notify: tuple[Notification, ...] = ()

    @property
    def watched(self) -> tuple[str, ...]:
        """All nodes that the supervisor watches."""
        return (self.head, *self.remote) if self.on_head else self.remote

    @property
    def may_be_taken_over(self) -> bool:
        """Whether another node may supervise the run if the head is lost. Requires automatic restarts.

        Excludes scheduled jobs, which are requeued, and your own program, which got the head's address at its start.
        """
        return bool(self.max_restarts and self.remote and self.on_head) and not (self.scheduler or self.observed)

    @property
    def hang_limit(self) -> str:
        """The line of the limits, for people, as a run starts."""
        return f"hang limit: {described(self.hang_timeout_s, self.planned_step_s, observed=self.observed)}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        return decode(cls, text)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads that of the run in ``folder``."""
        return cls.from_json((folder / run_folder.SUPERVISION).read_text())


def contract() -> str:
    """Identifies the protocol of the nodes and the form of ``supervision.json``. It must be equal on the operator's
    machine and the head for the head to start the run."""
    return f"{PROTOCOL}-{schema_digest(Supervision)}"


@dataclass(frozen=True, slots=True)
class NewLayout:
    """``tridock replan --json``: the layout with which a run continues after losing nodes, and its new files."""

    summary: str
    layout: str
    world_size: int
    nodes: tuple[str, ...]
    files: Mapping[str, str]
    version: int = JSON_VERSION
