"""What ``python -m tridock.node VERB`` answers, as JSON: one dataclass a verb, for the node and for whoever asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tridock.contracts.run_state import RunState
from tridock.errors import Problem

PROTOCOL: Final = 6
"""The version of the verbs and their answers, in every node report. To be raised with a change that a caller notices:
an image of another version is then named as such."""
USAGE: Final = 2
"""argparse's exit code: the image does not know the verb or an option. No verb of the doctor refuses a request."""


@dataclass(frozen=True, slots=True)
class PortAnswer:
    """A port of the node for the rendezvous, or why there is none."""

    port: int | None = None
    problem: Problem | None = None


# ---- runs and their processes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunInfo:
    """``runs``: one run of the workspace; None stands for what is unknown."""

    run_id: str
    state: RunState
    exit_code: int | None
    created: str
    """UTC, as ``yyyymmdd-hhmmss``."""
    metrics: Mapping[str, Any] | None
    """The last logged iteration."""
    experiment: str
    nodes: tuple[str, ...]
    train_iters: int | None
    duration_s: float | None
    """Until its end, or until now."""
    age_s: float | None
    """Since its last step."""
    head: str = ""
    """The node that answered; added by whoever asks several."""
    slots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of an active run: its slots on each node, by its plan."""


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """``enqueue`` and ``queue``: a run that waits for its slots, or has been started."""

    run_id: str
    node: str
    """Its head."""
    since: float
    """When it was queued, in seconds since the epoch."""
    slots: Mapping[str, tuple[int, ...]]
    waits_for: tuple[str, ...]
    """Active runs, and runs before it in the queue, that share slots with it."""
    started: bool = False


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank by its heartbeat, and the seconds since that."""

    rank: int
    phase: str
    iteration: int
    age_s: float


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """``run-update``: what is new in a run's records since the last answer."""

    state: RunState
    exit_code: int | None
    offset: int
    """Bytes of ``metrics.jsonl`` that are known now."""
    inode: int
    begins_anew: bool
    """Whether the records replace all that were known."""
    records: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    event_count: int
    ranks: tuple[RankProgress, ...]
    """The ranks of this node."""
    plan: Mapping[str, Any]
    """A part of the plan; empty in all answers but the first."""
    age_s: float | None
    """Since the last record."""


@dataclass(frozen=True, slots=True)
class Process:
    """``processes``: one process of a run; ``cpu_s`` is its processor time, ``age_s`` the time since its start."""

    run_id: str
    pid: int
    ppid: int
    command: tuple[str, ...]
    rss_bytes: int
    cpu_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class PlacedCode:
    """``place-code``: the files of a run's code that this node lacks, by their SHA-256; empty once all are in place."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file of a run's code: its content by SHA-256, and whether it may be executed."""

    sha256: str
    executable: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """``stop``: how many processes the run had, and how many remain (0 unless the kernel holds one back)."""

    stopped: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """``save``: how many ranks have received the signal to save and end."""

    ranks: int


@dataclass(frozen=True, slots=True)
class SpareStatus:
    """``spare-status``: the runs that a spare is busy with, the data files that it lacks, the checkpoint it sees."""

    busy: tuple[str, ...]
    missing: tuple[str, ...]
    checkpoint: str | None
    """A fingerprint of the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """``evidence``: what a node knows of a run that failed; a node that had no part in it knows nothing."""

    events: str = ""
    logs: Mapping[int, str] = field(default_factory=dict)
    """The end of each rank's log."""
    printed: Mapping[int, str] = field(default_factory=dict)
    """What torch has printed of each rank's exception into the launcher's output, for ranks without a log."""
    launcher: str = ""
    """The end of the launcher's output since the last start."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    """The last logged iterations."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """``ranks`` and ``memory`` of the plan."""
    kernel: tuple[str, ...] = ()
    """The kernel's messages about memory during the run."""
    last_collectives: Mapping[int, int] = field(default_factory=dict)
    """The number of the last collective that each rank began, from the flight recorders."""


# ---- before a launch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A file's size and SHA-256; of tokens and images the size alone. ``entries`` counts those of a vocabulary."""

    bytes: int
    sha256: str | None
    entries: int | None = None


@dataclass(frozen=True, slots=True)
class PreflightAnswer:
    """``preflight``: fingerprints of the run's files, and the content of JSON files; None for one that is missing."""

    files: Mapping[str, Fingerprint | None]
    read: Mapping[str, Any] = field(default_factory=dict)
    loads: bool = True
    """Whether the folder of the checkpoint to load is there."""
    has_tokenizer: bool = True
    """Whether a tokenizer is in one of the folders where the run looks for it."""
    rendezvous: PortAnswer | None = None
    """Of the head."""
    image_manifest: object = None
    """Of the head."""
    contract: str | None = None
    """Of the head (:func:`tridock.contracts.supervision.contract`); None from one that is too old to have it."""


@dataclass(frozen=True, slots=True)
class IndexMaps:
    """``tridock.train.megatron_lm.index_maps``: how many maps it made, and all that a run needs; or its problems."""

    made: int = 0
    files: tuple[str, ...] = ()
    """File names beside the data; the mark that says what the maps are of comes last."""
    problems: tuple[Problem, ...] = ()


# ---- the doctor ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Space:
    """Total and free bytes of a file system."""

    bytes: int
    free: int

    @property
    def is_nearly_full(self) -> bool:
        """Whether less than a twentieth is free."""
        return 20 * self.free < self.bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG slice of one; its memory in MiB (None where it shares the machine's), and what uses it."""

    index: int
    name: str
    total: int | None
    used: int | None
    processes: tuple[str, ...] = ()
    """Number, name and memory of each."""
    uuid: str = ""
    uncorrectable_errors: int = 0
    """Of its memory, since the driver was loaded."""
    row_remapping: str = ""
    """Of its memory: ``pending`` until the GPU is reset, or ``failed``."""
    slowdowns: tuple[str, ...] = ()
    """Why its clocks are lowered, in NVIDIA's words: heat, power."""
    fabric: str = ""
    """The state of NVSwitch's fabric for it, if that is not complete."""
    recovery: str = ""
    """What the driver asks for after an error: Reset, Reboot, …"""
    persistent: bool = True
    """Whether the driver stays loaded while nobody uses it."""
    nvlinks: int | None = None
    """Active NVLinks; None where it has none."""
    capability: str = ""
    """Compute capability, such as ``9.0``; empty where the driver does not tell."""


@dataclass(frozen=True, slots=True)
class Infiniband:
    """The InfiniBand devices of the host, and whether the container may use them."""

    devices: tuple[str, ...] = ()
    usable: bool = False


@dataclass(frozen=True, slots=True)
class Accelerators:
    """``gpus`` is None without ``nvidia-smi``; ``error`` is its message where it fails."""

    gpus: tuple[Gpu, ...] | None = None
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver supports, with forward compatibility where a rank has it."""
    error: str = ""
    timed_out: bool = False
    peer_memory: bool = False
    """Whether InfiniBand devices may read the GPUs' memory."""


@dataclass(frozen=True, slots=True)
class Code:
    """SHA-256 of Tridock's code and of the patched Megatron-LM (None if absent), and what the image's manifest says."""

    tridock: str | None
    megatron: str | None
    cuda: str | None = None
    torch: str | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class SshAnswer:
    """What the head's ssh to a node printed, and its exit code (None after a timeout)."""

    exit: int | None
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickReport:
    """``node-report --quick``: what every launch checks."""

    protocol: int
    shm: Space | None
    disk: Space | None
    unwritable: str | None
    """The error of writing into ``runs/``."""
    built_for: str | None
    """What the image was built for: ``cuda`` or ``cpu``."""
    cuda_error: str | None
    """Why CUDA's driver gives a process no device, in an image for GPUs."""
    capabilities: tuple[str, ...] = ()
    """The compute capability of each device that it gives, such as ``9.0``."""
    architectures: tuple[str, ...] = ()
    """What the image's torch has kernels for, such as ``sm_90``; empty in an image for the CPU."""
    ssh: Mapping[str, SshAnswer] = field(default_factory=dict)
    """By node; only the head is asked."""

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks of this node run on GPUs."""
        return self.built_for != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(QuickReport):
    """``node-report``."""

    memlock: int | None
    """The limit of locked bytes; None if unlimited, as of ``files``."""
    files: int | None
    """The limit of open files."""
    cores: int
    """The cores that a process may use."""
    accelerators: Accelerators
    infiniband: Infiniband
    code: Code
    runs: tuple[str, ...]
    """The runs that have processes here."""
    rendezvous: PortAnswer
    nccl_ib_disable: str | None
    no_reduction: str | None = None
    """Why this node's image cannot run the doctor's all-reduce; None if it can."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """``host-key``: the fingerprint of the key that the node's sshd presents; None if it does not answer."""

    fingerprint: str | None


# ---- the mesh probe: the head asks the node's responder over ssh -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up; its addresses in the system's order, IPv4 first."""

    name: str
    mtu: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChosenInterface:
    """The interface and the address that a library uses."""

    name: str
    mtu: int
    address: str


@dataclass(frozen=True, slots=True)
class Network:
    """The interfaces of a node; for ``gloo`` and ``nccl`` the one it chooses and the value of its variable."""

    interfaces: tuple[Interface, ...]
    chosen: Mapping[str, ChosenInterface | None]
    wanted: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Hello:
    """A responder's first line."""

    environment: Mapping[str, str]
    network: Network
    port: int
    """Where it listens for the other nodes."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node: the address at which it is reached, and where its responder listens."""

    address: str
    port: int
    listens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshRequest:
    """What the head asks a responder: to probe these peers, or for the time if there are none."""

    peers: Mapping[str, Peer] | None = None


@dataclass(frozen=True, slots=True)
class Time:
    """The responder's clock, in seconds since the epoch."""

    time: float


@dataclass(frozen=True, slots=True)
class Route:
    """The address that a name resolves to, the source address of the route there and its interface; or the error."""

    target: str = ""
    source: str = ""
    interface: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Unreached:
    """A peer's address that does not answer."""

    node: str
    address: str
    error: str


@dataclass(frozen=True, slots=True)
class PeerProbe:
    """What a responder finds out about its peers."""

    unreached: tuple[Unreached, ...] = ()
    routes: Mapping[str, Route] = field(default_factory=dict)
    sees: tuple[str, ...] = ()
    """The peers whose probe files lie in this node's workspace, which they therefore share."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A node's time minus the head's, and the error bound of that, in seconds."""

    offset: float
    error: float


@dataclass(frozen=True, slots=True)
class MeshAnswer:
    """``mesh-probe``: what came of one node; ``hello``, ``clock`` and ``peers`` only where its responder answered."""

    ssh: SshAnswer
    hello: Hello | None = None
    clock: Clock | None = None
    peers: PeerProbe | None = None
