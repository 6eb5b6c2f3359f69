"""ZeRO-Offload and ZeRO-Infinity: states that DeepSpeed keeps in the host's memory or on NVMe, and the transfers. Pure.

The bytes of the host were counted with DeepSpeed 0.19.8 on a simulated GPU (tests/unit/train/test_on_a_gpu.py); those
of NVMe are the sizes of its files and buffers (``runtime/swap_tensor``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final, Literal, Self, cast

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.shape import FORMAT_BYTES, HostWork, LayoutShape, States

OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
OFFLOAD: Final = (OPTIMIZER, PARAM)
"""Options of a DeepSpeed JSON, each a mapping."""
NVME_OP: Final = "deepspeed.ops.aio.async_io_op"
"""DeepSpeed's compiled op that reads and writes NVMe."""
SUB_GROUP: Final = 100_000_000
"""Elements that Adam updates at a time from NVMe. DeepSpeed's default, 1e9, locks 16 GB of memory for each rank."""
_SWAPPED_FROM: Final = 2**20
"""Bytes of a tensor that DeepSpeed writes to NVMe; smaller ones stay in the host's memory (``MIN_AIO_BYTES``)."""
_IN_CPU: Final = 1_000_000_000
"""max_in_cpu: elements of weights that stay in the host's memory all the same."""
OffloadDevice = Literal["", "cpu", "nvme"]
_KINDS: Final = {"device": ("cpu", "nvme", "none"), "pin_memory": (True, False)}
_OF_NVME: Final[Mapping[str, Mapping[str, int]]] = {
    OPTIMIZER: {"buffer_count": 4},  # weights, gradients and two moments
    PARAM: {"buffer_count": 1, "buffer_size": 1, "max_in_cpu": 0},
}
"""Numbers that only ``device: nvme`` has, each with its least value."""
_ADAM_BYTES: Final = 30
"""Bytes that Adam reads and writes on the host for each weight: it reads the fp32 weight, gradient and two moments
(16), writes all but the gradient (12), and writes the weight in the 16-bit format (2)."""
_NVME_BYTES: Final = 32
"""Bytes to and from NVMe for each weight that Adam updates: 12 are read and written, as are 4 of the gradient."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Where ``deepspeed.zero_optimization`` keeps states: "" is the GPU, "cpu" the host's memory (Ren et al., 2021,
    ZeRO-Offload), "nvme" a folder (Rajbhandari et al., 2021, ZeRO-Infinity)."""

    optimizer: OffloadDevice
    parameters: OffloadDevice

    @classmethod
    def of(cls, experiment: Experiment) -> Self:
        """Reads the experiment's DeepSpeed options; both are "" without ``offload_*``."""
        return cls(*(_place(_section(experiment, path)) for path in OFFLOAD))

    @property
    def on_nvme(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters)

    @property
    def label(self) -> str:
        """Returns its short form for tables, after that of the ZeRO stage."""
        return f" {'o' * bool(self.optimizer)}{'p' * bool(self.parameters)}".rstrip()

    def states(self, states: States, experiment: Experiment, owned: int, shape: LayoutShape, widest: int) -> States:
        """Moves the offloaded bytes of ``states`` from the GPU to the host and to NVMe; returns the new states.

        The rank owns ``owned`` elements, at most ``widest`` of one tensor. For each element the host holds the fp32
        master weight (4 bytes), Adam's moments (8), the fp32 gradient (4), and a buffer for the weight in the 16-bit
        format; in stage 2 also the gradient of earlier micro-batches. On NVMe the first three lie in files, and the
        host has locked buffers for one group of elements.
        """
        short, stage = FORMAT_BYTES[experiment.precision], experiment.parallel.zero_stage
        group = min(owned, zero_option(experiment, "sub_group_size", SUB_GROUP) + widest)
        if self.optimizer:
            gathering = short if stage == 2 and shape.accumulation > 1 else 0
            swaps = self._swaps_optimizer(owned)
            locked = 4 * group * _number(experiment, OPTIMIZER, "buffer_count", 4) if swaps else 0
            states = replace(
                states,
                gradients=0,
                optimizer=0,
                step_gradients=states.step_gradients if stage == 1 else 0,
                workspace=0,
                startup=states.weights + short * owned,
                offloaded=0 if swaps else 12 * owned,
                host_buffers=((0 if swaps else 4) + short + gathering) * owned + locked,
                locked=locked,
                swapped=12 * owned if swaps else 0,
                swap_buffers=4 * owned if swaps else 0,
            )
        if self.parameters:
            swapped, locked = self._swapped_weights(experiment, owned), 0
            if self.parameters == "nvme":
                size = _number(experiment, PARAM, "buffer_size", widest)
                locked = short * size * _number(experiment, PARAM, "buffer_count", 5)
                # The new weights of a group pass through a buffer of the size of its whole tensors.
                locked += short * group * shape.data if swapped else 0
            states = replace(
                states,
                weights=states.weights - short * owned,
                startup=states.startup - short * owned,
                offloaded=states.offloaded + short * (owned - swapped),
                host_buffers=states.host_buffers + locked,
                locked=states.locked + locked,
                swapped=states.swapped + short * swapped,
            )
        return states

    def _swaps_optimizer(self, owned: int) -> bool:
        return self.optimizer == "nvme" and 4 * owned >= _SWAPPED_FROM

    def _swapped_weights(self, experiment: Experiment, owned: int) -> int:
        """Returns the elements of weights that lie on NVMe."""
        if self.parameters != "nvme":
            return 0
        return max(0, owned - _number(experiment, PARAM, "max_in_cpu", _IN_CPU))

    def moved(self, experiment: Experiment, shape: LayoutShape, owned: int) -> HostWork:
        """Returns the bytes that a rank with ``owned`` elements transfers in one iteration, and those of its Adam."""
        short, steps = FORMAT_BYTES[experiment.precision] * owned, shape.accumulation
        work = HostWork()
        if self.optimizer:
            # Stage 1 sends gradients once. The others add each micro-batch's gradients to the earlier ones on the GPU.
            sent = short * (1 if experiment.parallel.zero_stage == 1 else 2 * steps - 1)
            on_nvme = _NVME_BYTES * owned if self._swaps_optimizer(owned) else 0
            work = HostWork(_ADAM_BYTES * owned, gradients=sent, weights=short, nvme=on_nvme)
        if self.parameters:
            # From NVMe they are read as often, and the new ones written once.
            swapped = FORMAT_BYTES[experiment.precision] * self._swapped_weights(experiment, owned)
            weights, nvme = work.weights + 2 * steps * short, work.nvme + (2 * steps + 1) * swapped
            work = replace(work, weights=weights, nvme=nvme)
        return work


def zero_option(experiment: Experiment, name: str, default: int) -> int:
    """Returns an option of ``zero_optimization`` from the experiment's own DeepSpeed JSON, or the default."""
    given = experiment.deepspeed.get("zero_optimization")
    value = given.get(name, default) if isinstance(given, Mapping) else default
    return int(value) if isinstance(value, int | float) else default


def nvme_folders(experiment: Experiment) -> dict[str, str]:
    """Returns the folders on NVMe that every node needs, each with the option that names it."""
    given = {path: _section(experiment, path) for path in OFFLOAD}
    return {
        str(options["nvme_path"]): f"deepspeed.{path}.nvme_path"
        for path, options in given.items()
        if _place(options) == "nvme"
    }


def nvme_config(experiment: Experiment) -> dict[str, Any]:
    """Returns what ``zero_optimization`` has for states on NVMe, unless the experiment says otherwise."""
    offload = Offload.of(experiment)
    config: dict[str, Any] = {"sub_group_size": SUB_GROUP} if offload.on_nvme else {}
    if offload.parameters == "nvme":
        # Gathered weights keep their buffers until they are released: with DeepSpeed's 1e9 elements they run out.
        config["stage3_max_reuse_distance"] = 0
    return config


def offload_choices(experiment: Experiment) -> Iterator[Mapping[str, object]]:
    """Yields an experiment's DeepSpeed options with the optimizer's states on the host, and in ZeRO stage 3 with the
    weights there too; nothing if it has no ZeRO stage, or offloads already."""
    stage, given = experiment.parallel.zero_stage, Offload.of(experiment)
    if stage == 0 or given.optimizer or given.parameters:
        return
    for paths in OFFLOAD[:1], *([OFFLOAD] if stage == 3 else []):
        section = experiment.deepspeed.get("zero_optimization", {})
        offloaded = {path.rpartition(".")[2]: {"device": "cpu"} for path in paths}
        yield {"deepspeed": {**experiment.deepspeed, "zero_optimization": {**section, **offloaded}}}


def offload_problems(experiment: Experiment, path: str, value: object) -> Iterator[Problem]:
    """Yields the problems of ``value``, given at the option ``path``, one of :data:`OFFLOAD`."""
    where, stage = f"deepspeed.{path}", experiment.parallel.zero_stage
    if not isinstance(value, Mapping):
        yield Problem(where, "must be a mapping", repr(value), "write {device: cpu}")
        return
    place = _place(value)
    for name, given in value.items():
        if name in _KINDS:
            if not any(given is choice or (given == choice and isinstance(given, str)) for choice in _KINDS[name]):
                choices = "cpu, nvme or none" if name == "device" else "true or false"
                yield Problem(f"{where}.{name}", f"must be {choices}", repr(given), "write one")
        elif name not in ("nvme_path", *_OF_NVME[path]):
            yield Problem(f"{where}.{name}", "does not reach DeepSpeed", str(given), "leave it out")
        elif place != "nvme":
            yield Problem(f"{where}.{name}", "is of device nvme", str(given), "set device to nvme, or leave this out")
        elif name != "nvme_path" and not _is_whole(given, least := _OF_NVME[path][name]):
            yield Problem(f"{where}.{name}", f"must be a whole number from {least}", repr(given), "write one")
    if place == "nvme" and not _is_absolute(value.get("nvme_path")):
        got, todo = repr(value.get("nvme_path")), "write a folder on the NVMe of every node, such as /local_nvme"
        yield Problem(f"{where}.nvme_path", "must be an absolute path", got, todo)
    if not place:
        return
    if (path == PARAM or place == "nvme") and stage != 3:
        what = f"needs ZeRO stage 3{'' if path == PARAM else ' for device nvme'}"
        yield Problem(where, what, f"parallel.zero_stage {stage}", "set it to 3, or leave this out", (3,))
    elif stage == 0:
        todo = "set it to 1, 2 or 3, or leave this out"
        yield Problem(where, "needs a ZeRO stage from 1 to 3", "parallel.zero_stage 0", todo, (1, 2, 3))


def _section(experiment: Experiment, path: str) -> Mapping[str, Any]:
    """Returns the options at ``path``; empty if they are not given or no mapping."""
    given = experiment.deepspeed.get("zero_optimization")
    found = given.get(path.rpartition(".")[2]) if isinstance(given, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _place(options: Mapping[str, Any]) -> OffloadDevice:
    device = options.get("device", "none")
    return cast("OffloadDevice", device) if device in ("cpu", "nvme") else ""


def _number(experiment: Experiment, path: str, name: str, default: int) -> int:
    value = _section(experiment, path).get(name, default)
    return int(value) if _is_whole(value, 0) else default


def _is_whole(value: object, least: int) -> bool:
    """Whether it is a whole number, which YAML and JSON may write as 1e8."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) >= least


def _is_absolute(value: object) -> bool:
    return isinstance(value, str) and PurePosixPath(value).is_absolute()
