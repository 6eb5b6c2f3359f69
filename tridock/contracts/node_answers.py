"""JSON answers of ``python -m tridock.node VERB``: one dataclass per verb, shared by the node and its callers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tridock.contracts.data_index import Part
from tridock.contracts.forms import IndexMapName, NodeName, RunId, Sha256, UtcTime
from tridock.contracts.images import ImageArrays
from tridock.contracts.network import Network
from tridock.contracts.pretrained import StoredWeights
from tridock.contracts.run_state import RunState
from tridock.errors import Problem

PROTOCOL: Final = 18
"""Version of the verbs and their answers, part of every node report. Increase it with every change that a caller
notices; a node whose image has another version is then reported."""
USAGE: Final = 2
"""argparse's exit code: the image does not know the verb or an option. No verb of the doctor exits with it."""


@dataclass(frozen=True, slots=True)
class PortAnswer:
    """A port of the node for the rendezvous, or the reason why none is free."""

    port: int | None = None
    problem: Problem | None = None


# ---- runs and their processes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunInfo:
    """``runs``: one run in the workspace. None stands for an unknown value."""

    run_id: RunId
    state: RunState
    exit_code: int | None
    created: UtcTime
    """UTC, as ``yyyymmdd-hhmmss``."""
    metrics: Mapping[str, Any] | None
    """The last logged iteration."""
    experiment: str
    nodes: tuple[NodeName, ...]
    train_iters: int | None
    duration_s: float | None
    """Seconds until its end, or until now."""
    age_s: float | None
    """Seconds since its last step."""
    head: str = ""
    """The node that answered, added by a caller that asks several."""
    slots: Mapping[NodeName, tuple[int, ...]] = field(default_factory=dict)
    """The slots on each node, from its plan, of a run that is active or has processes here."""
    has_processes: bool = False
    """Whether the node that answered has processes of it, or its supervisor or agent."""
    started_by: str = ""
    """``user@machine`` of the command that made it."""
    disk_bytes: int | None = None
    """What its folder takes on disk, if asked for: of a cluster's run, on all nodes that are up."""
    folder_id: str = ""
    """The same on two nodes that share its folder."""


@dataclass(frozen=True, slots=True)
class Removal:
    """``remove``: runs that stay, because they are running or queued, or a running one has loaded their checkpoint."""

    kept: tuple[RunId, ...]


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The answer to ``withdraw``: whether the run was started or is queued, so that its folder stays."""

    started: bool


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """``enqueue`` and ``queue``: a run that is queued for its slots, or has been started."""

    run_id: RunId
    node: NodeName
    """The run's head."""
    since: float
    """Time of queueing, in seconds since the epoch."""
    slots: Mapping[NodeName, tuple[int, ...]]
    waits_for: tuple[RunId, ...]
    """Active runs and earlier queued runs that use some of its slots."""
    started: bool = False


@dataclass(frozen=True, slots=True)
class RankProgress:
    """A rank's last heartbeat, and the seconds since its last progress."""

    rank: int
    phase: str
    iteration: int
    age_s: float
    limit_s: float | None = None
    """The seconds without progress after which it counts as hung; None for never."""


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """``run-update``: a run's new records since the last answer."""

    state: RunState
    exit_code: int | None
    offset: int
    """Bytes of ``metrics.jsonl`` read so far."""
    inode: int
    replaces_earlier: bool
    """Whether the records replace all earlier ones."""
    records: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    event_count: int
    ranks: tuple[RankProgress, ...]
    """This node's ranks."""
    plan: Mapping[str, Any]
    """An excerpt of the plan; only in the first answer."""
    age_s: float | None
    """Seconds since the last record."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run; ``cpu_s`` is its CPU time, ``age_s`` the time since its start."""

    run_id: RunId
    pid: int
    ppid: int
    command: tuple[str, ...]
    cpu_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class PlacedCode:
    """``place-code``: SHA-256 of the code files that this node lacks; empty once all are in place."""

    missing: tuple[Sha256, ...]


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file of a run's code: its SHA-256, and whether it is executable. If its name ends in /, an empty folder."""

    sha256: Sha256
    executable: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """``stop``: the number of the run's processes before, and after (0 unless one is stuck in the kernel)."""

    stopped: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """``save``: the number of ranks that received the signal to save and end."""

    ranks: int


@dataclass(frozen=True, slots=True)
class SpareStatus:
    """``spare-status``: the runs that keep a spare busy, and the data files that it lacks."""

    busy: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """``evidence``: a node's evidence about a failed run; empty on a node that took no part in it."""

    events: str = ""
    logs: Mapping[int, str] = field(default_factory=dict)
    """The end of each rank's log."""
    printed: Mapping[int, str] = field(default_factory=dict)
    """Each rank's exception as torch printed it to the launcher's output, for ranks without a log."""
    launcher: str = ""
    """The end of the launcher's output, since the last start."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    """The last logged iterations."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """``ranks`` and ``memory`` from the plan."""
    kernel: tuple[str, ...] = ()
    """The kernel's messages about memory during the run."""
    last_collectives: Mapping[int, int] = field(default_factory=dict)
    """Sequence number of the last collective that each rank began, from torch's flight recorder."""


# ---- before a launch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A file's size and SHA-256; only the size for token files and images. ``entries`` is a vocabulary's size."""

    bytes: int
    sha256: str | None
    entries: int | None = None


@dataclass(frozen=True, slots=True)
class NvmeFolder:
    """A folder for states that do not fit into memory."""

    problem: str | None
    """Why ranks cannot write there past the page cache, or None."""
    free: int = 0
    """Free bytes of its file system."""
    device: int = 0
    """The number of its file system."""


@dataclass(frozen=True, slots=True)
class PreflightAnswer:
    """``preflight``: fingerprints of the run's files and content of its JSON files; None for a missing file."""

    files: Mapping[str, Fingerprint | None]
    read: Mapping[str, Any] = field(default_factory=dict)
    loads: bool = True
    """Whether the folder of the checkpoint to load exists."""
    load_lacks: str | None = None
    """What a folder to resume from lacks to hold a checkpoint; None if it holds one."""
    load_inside: str | None = None
    """The folder in it that holds checkpoints, if it holds none itself."""
    load_format: str | None = None
    """Another program's format of the checkpoint to load, as in ``train.load: FORMAT:DIR``."""
    load_progress: object = None
    """``tridock.json`` of the checkpoint to continue, if it has one."""
    weights: StoredWeights | None = None
    """The weights that the run starts from, if it does."""
    has_tokenizer: bool = True
    """Whether one of the folders that the run searches has a tokenizer."""
    tokenizers_of_weights: tuple[str, ...] | None = None
    """SHA-256 that the tokenizer of the weights to load may have; none if it is not known; None without weights."""
    tokenizer_of_files: str | None = None
    """SHA-256 of the tokenizer in GPT-2's two files, if the run reads them."""
    missing_packages: tuple[str, ...] = ()
    """The Python packages that the run needs and this node's image does not have."""
    lacks: tuple[Problem, ...] = ()
    """What else the run needs and this node does not have."""
    multicast: bool | None = None
    """Whether all GPUs of the node have CUDA multicast, if the run needs it."""
    memory: int | None = None
    """Bytes of memory that processes on this node may use: the host's, or the container's limit."""
    memlock: int | None = None
    """Bytes that a process may lock in memory; None: any number."""
    nvme: Mapping[str, NvmeFolder] = field(default_factory=dict)
    """The folders on NVMe that the run needs."""
    save_problem: str = ""
    """Why ranks cannot save into the folder that was asked for."""
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    """From the head, by prefix: parts for training, validation and test of each data set that can be read."""
    images: ImageArrays | None = None
    """From the head: the arrays of an image model."""
    damage: Problem | None = None
    """From the head: what is wrong with the data set's index or arrays."""
    rendezvous: PortAnswer | None = None
    """Of the head."""
    image_manifest: object = None
    """Of the head."""
    contract: str | None = None
    """From the head (:func:`tridock.contracts.supervision.contract`); None from an image too old to have it."""


@dataclass(frozen=True, slots=True)
class IndexMaps:
    """``tridock.train.megatron_lm.index_maps``: the number of maps made, and all that a run needs; or the problems."""

    made: int = 0
    files: tuple[IndexMapName, ...] = ()
    """File names beside the data. The marker file that identifies the maps comes last."""
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
class GpuStatus:
    """A GPU or MIG slice: memory in MiB (None if shared with the machine's), and the processes that use it."""

    index: int
    name: str
    total: int | None
    used: int | None
    processes: tuple[str, ...] = ()
    """Pid, name and memory of each process."""
    uuid: str = ""
    uncorrectable_errors: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    row_remapping: str = ""
    """Row remapping: ``pending`` until the GPU is reset, or ``failed``."""
    slowdowns: tuple[str, ...] = ()
    """NVIDIA's reason for lowered clocks, such as heat or power."""
    fabric: str = ""
    """State of its NVSwitch fabric registration, if not complete."""
    recovery: str = ""
    """The driver's recovery action after an error: Reset, Reboot, …"""
    persistent: bool = True
    """Persistence mode: whether the driver stays loaded while the GPU is unused."""
    nvlinks: int | None = None
    """Number of active NVLinks; None on a GPU without NVLink."""
    capability: str = ""
    """Compute capability, such as ``9.0``; empty if the driver does not report it."""


@dataclass(frozen=True, slots=True)
class Infiniband:
    """The InfiniBand devices of the host, and whether the container may use them."""

    devices: tuple[str, ...] = ()
    usable: bool = False


@dataclass(frozen=True, slots=True)
class Accelerators:
    """``gpus`` is None without ``nvidia-smi``; ``error`` is its message if it fails."""

    gpus: tuple[GpuStatus, ...] | None = None
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver supports, including forward compatibility available to a rank."""
    error: str = ""
    timed_out: bool = False
    peer_memory: bool = False
    """GPUDirect RDMA: whether InfiniBand devices may access the GPUs' memory."""


@dataclass(frozen=True, slots=True)
class Code:
    """SHA-256 of Tridock's code and of the patched Megatron-LM (None if absent), CUDA's version in the image."""

    tridock: str | None
    megatron: str | None
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class SshAnswer:
    """Output and exit code (None after a timeout) of the head's ssh to a node."""

    exit: int | None
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock of torch's extension builder that no process of the node holds, and the seconds since it was made."""

    path: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickReport:
    """``node-report --quick``: the facts that every launch checks."""

    protocol: int
    shm: Space | None
    disk: Space | None
    unwritable: str | None
    """The error on writing to ``runs/``."""
    built_for: str | None
    """The image's flavor: ``cuda`` or ``cpu``."""
    cuda_error: str | None
    """In an image for GPUs: why the CUDA driver gives a process no device."""
    capabilities: tuple[str, ...] = ()
    """Compute capability of each device that the driver gives, such as ``9.0``."""
    architectures: tuple[str, ...] = ()
    """Architectures that the image's torch has kernels for, such as ``sm_90``; empty in an image for the CPU."""
    ssh: Mapping[str, SshAnswer] = field(default_factory=dict)
    """Answers by node; only in the head's report."""
    network: Network | None = None

    @property
    def on_gpus(self) -> bool:
        """Whether this node's ranks run on GPUs."""
        return self.built_for != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(QuickReport):
    """``node-report``."""

    memlock: int | None
    """Limit of locked memory in bytes; None if unlimited, as for ``files``."""
    files: int | None
    """Limit of open files."""
    cores: int
    """Cores available to a process."""
    accelerators: Accelerators
    infiniband: Infiniband
    code: Code
    runs: tuple[RunId, ...]
    """Runs with processes on this node."""
    rendezvous: PortAnswer
    nccl_ib_disable: str | None
    no_reduction: str | None = None
    """Why this node's image cannot run the doctor's all-reduce, or None if it can."""
    build_locks: tuple[BuildLock, ...] = ()


@dataclass(frozen=True, slots=True)
class HostKey:
    """``host-key``: fingerprint of the host key that the node's sshd presents; None if sshd does not answer."""

    fingerprint: str | None
