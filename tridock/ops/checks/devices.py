"""GPUs and InfiniBand of the nodes against the slots and the image, and who holds the slots. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from tridock.base_images import Capability, base_for, has_kernels, parse_capability
from tridock.cluster.settings import Cluster
from tridock.command import Command
from tridock.contracts.node_answers import Accelerators, GpuStatus, NodeReport, QuickReport
from tridock.contracts.run_folder import is_run_id
from tridock.contracts.run_state import RunState
from tridock.errors import Problem, count
from tridock.ops.checks.finding import UP, Finding, Reports, fail, warn

_BUSY_MIB: Final = 1024
"""A driver and a display use less memory than this."""
_FAULTY: Final = "a rank on it ends with an error, or its results are wrong"
_SLOWEST: Final = "the slowest GPU sets the pace of all, and the smallest one the memory"
_XID: Final = re.compile(r"NVRM: (Xid \((?:PCI:)?[^)]+\): (\d+).*)")
# Xid errors of the hardware or the driver. Others, such as 13, 31 and 43, usually come from a program.
_HARDWARE_XIDS: Final = frozenset((48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140))
_PROCESS: Final = re.compile(r"^((?:GPU|MIG)-\S+), (\d+), (.+), ([^,\n]+)$", re.MULTILINE)
_HOST_SCRIPT: Final = """\
dmesg 2>/dev/null | grep -F 'Xid (' | tail -n 20
nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader 2>/dev/null || true
"""


@dataclass(frozen=True, slots=True)
class GpuHost:
    """A host's report on its GPUs: the last error in the kernel log, and processes by GPU UUID."""

    xids: tuple[str, ...] = ()
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def gpu_host_command() -> Command:
    """The command that asks a host; :func:`parse_gpu_host` reads its output."""
    return Command.of("sh", "-c", _HOST_SCRIPT)


def parse_gpu_host(output: str) -> GpuHost:
    """Parses the host's answer; empty if the log is not readable or ``nvidia-smi`` is missing."""
    xids = [found[1] for found in _XID.finditer(output) if int(found[2]) in _HARDWARE_XIDS]
    processes: dict[str, tuple[str, ...]] = {}
    for uuid, number, name, memory in _PROCESS.findall(output):
        processes[uuid] = (*processes.get(uuid, ()), f"{number} {name}, {memory}")
    return GpuHost(tuple(xids[-1:]), processes)


def cuda_findings(node: str, slots: Sequence[int], report: QuickReport) -> Iterator[Finding]:
    """Yields what would make a rank fail: a CUDA driver error, or a GPU that the image's torch has no kernels for.

    A GPU outside the slots, such as one for a display, may be of any model.
    """
    yield from _cuda_error(node, report)
    capabilities = [report.capabilities[slot] for slot in slots if slot < len(report.capabilities)]
    yield from _kernels(node, report.architectures, capabilities, None)


def _cuda_error(node: str, report: QuickReport) -> Iterator[Finding]:
    if report.cuda_error:
        todo = "see that nvidia-smi works on the host, then recreate its container: tridock down, then tridock up"
        problem = Problem(node, "CUDA has no usable GPU in its container", report.cuda_error, todo)
        yield fail("devices", problem, "a rank without a GPU ends at once")


def device_findings(
    cluster: Cluster, reports: Reports, hosts: Mapping[str, GpuHost] = MappingProxyType({})
) -> Iterator[Finding]:
    """Slots present, idle and healthy, driver and CUDA against the image, the same GPUs everywhere, InfiniBand in use.

    ``hosts`` has what the nodes' hosts say: a container does not see the processes of others.
    """
    for node, report in reports.items():
        if report.on_gpus:
            yield from _gpus(cluster, node, report, hosts.get(node, GpuHost()))
        yield from _infiniband(node, report)
    own = {node: report.accelerators for node, report in reports.items() if report.on_gpus}
    yield from _differences({node: accelerators for node, accelerators in own.items() if accelerators.gpus})


def _gpus(cluster: Cluster, node: str, report: NodeReport, host: GpuHost) -> Iterator[Finding]:
    slots, gpus = cluster.everywhere[node], report.accelerators.gpus
    if host.xids:
        todo = "look the number up in NVIDIA's list of Xid errors, and leave the GPU out with --exclude if it returns"
        yield warn("devices", Problem(node, "its driver logged errors of a GPU", "; ".join(host.xids), todo), _FAULTY)
    if not gpus:
        problem = Problem(node, *_not_visible(report.accelerators))
        yield fail("devices", problem, f"its hostfile line has {count(len(slots), 'slot')}, which are GPUs")
        return
    missing = [slot for slot in slots if slot >= len(gpus)]
    if missing:
        got = f"{count(len(gpus), 'GPU')}, slots {', '.join(map(str, missing))} asked for"
        todo = "correct its slots in the hostfile, or see why nvidia-smi shows fewer there"
        what = "has fewer GPUs than slots"
        yield fail("devices", Problem(node, what, got, todo), "a rank without a GPU ends at once")
    for slot in slots:
        if slot < len(gpus):
            yield from _health(node, slot, gpus[slot], gpus)
        if slot < len(gpus) and (got := _use(gpus[slot], host)):
            todo = "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude"
            yield warn(
                "devices", Problem(node, f"GPU {slot} is in use", got, todo), "a rank finds less memory and time"
            )
    if any(slot < len(gpus) and not gpus[slot].persistent for slot in slots):
        todo = "turn it on there: sudo nvidia-smi -pm 1"
        why = "every start of a run, and every nvidia-smi, loads the driver again"
        yield warn("devices", Problem(node, "persistence mode of its GPUs is off", "", todo), why)
    yield from _cuda_error(node, report)
    yield from _base(node, report, [gpus[slot] for slot in slots if slot < len(gpus)])


def _not_visible(accelerators: Accelerators) -> tuple[str, str, str]:
    """What is wrong, what ``nvidia-smi`` says, and what to do."""
    what, error = "no GPU is visible in its container", accelerators.error
    if accelerators.timed_out:
        return what, error, "turn persistence mode on there (sudo nvidia-smi -pm 1), and look for Xid lines in dmesg"
    if error == "Failed to initialize NVML: Unknown Error":
        # Docker's systemd cgroup driver: systemctl daemon-reload on the host takes the devices of running containers.
        return "its container has lost its GPUs", error, "recreate its container: tridock down, then tridock up"
    if "Driver/library version mismatch" in error:
        todo = "restart the host, whose driver was updated, then tridock down, tridock up"
        return "its container has the libraries of another driver", error, todo
    return (
        what,
        error,
        "see that nvidia-smi works on the host and in docker run --gpus all (NVIDIA's container toolkit)",
    )


def _health(node: str, slot: int, gpu: GpuStatus, others: Sequence[GpuStatus]) -> Iterator[Finding]:
    if gpu.fabric:
        todo = (
            "start the fabric manager there (sudo systemctl start nvidia-fabricmanager), then tridock down, tridock up"
        )
        problem = Problem(node, f"GPU {slot} has not joined the NVLink fabric", gpu.fabric, todo)
        yield fail("devices", problem, "CUDA starts on no GPU of an NVSwitch host without it")
    if gpu.recovery:
        todo = f"do that there (sudo nvidia-smi --gpu-reset -i {gpu.index}, or restart the host), or --exclude the slot"
        yield fail("devices", Problem(node, f"GPU {slot} needs recovery", gpu.recovery, todo), _FAULTY)
    errors = [f"{gpu.uncorrectable_errors} since the driver was loaded"] if gpu.uncorrectable_errors else []
    errors += [f"row remapping {gpu.row_remapping}"] if gpu.row_remapping else []
    if errors:
        todo = f"reset it there (sudo nvidia-smi --gpu-reset -i {gpu.index}), and replace it if they return"
        problem = Problem(node, f"GPU {slot} has uncorrectable memory errors", ", ".join(errors), todo)
        yield warn("devices", problem, _FAULTY)
    if gpu.slowdowns:
        todo = "see its cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there)"
        problem = Problem(node, f"GPU {slot} has lowered its clocks", ", ".join(gpu.slowdowns), todo)
        yield warn("devices", problem, _SLOWEST)
    most = max(other.nvlinks or 0 for other in others)
    if gpu.nvlinks is not None and gpu.nvlinks < most:
        got = f"{gpu.nvlinks} active, {most} of another GPU"
        todo = "see nvidia-smi nvlink --status there, and reset the GPU"
        yield warn("devices", Problem(node, f"GPU {slot} has inactive NVLinks", got, todo), _SLOWEST)


def _use(gpu: GpuStatus, host: GpuHost) -> str:
    if processes := gpu.processes or host.processes.get(gpu.uuid, ()):
        return ", ".join(processes)
    if gpu.used is not None and gpu.used > _BUSY_MIB:
        return f"{gpu.used} of {gpu.total} MiB held by processes that cannot be seen from here"
    return ""


def _base(node: str, report: NodeReport, gpus: Sequence[GpuStatus]) -> Iterator[Finding]:
    """Whether the image's CUDA and torch are for the node's driver and GPUs; the remedy names the base that is."""
    driver, image = report.accelerators.cuda, report.code.cuda
    capabilities = [gpu.capability for gpu in gpus]
    if driver is not None and image is not None and int(driver.split(".")[0]) < int(image.split(".")[0]):
        got = f"driver {report.accelerators.driver} for CUDA {driver}, the image has CUDA {image}"
        base = base_for(_parsed(capabilities), driver)
        todo = "install a newer driver there" + (f", or build the image on an older base: {base.build}" if base else "")
        problem = Problem(node, "its driver is too old for the image", got, todo)
        yield fail("devices", problem, "CUDA starts on no GPU there")
    else:
        yield from _kernels(node, report.architectures, capabilities, driver)


def _kernels(node: str, built: Sequence[str], given: Sequence[str], driver: str | None) -> Iterator[Finding]:
    """Whether an image's torch has kernels for GPUs of the given compute capabilities."""
    capabilities = _parsed(given)
    if not built or not (foreign := sorted({it for it in capabilities if not has_kernels(built, it)})):
        return
    numbers = ", ".join(f"{major}.{minor}" for major, minor in foreign)
    got = f"compute capability {numbers}, kernels for {' '.join(built)}"
    base = base_for(capabilities, driver)
    todo = f"build the image on a base for them: {base.build}" if base else "leave the node out with --exclude"
    problem = Problem(node, "the image's torch has no kernels for its GPUs", got, todo)
    yield fail("devices", problem, "the first kernel of a rank fails: no kernel image is available")


def _parsed(capabilities: Sequence[str]) -> list[Capability]:
    return [it for text in capabilities if (it := parse_capability(text)) is not None]


def _differences(accelerators: Mapping[str, Accelerators]) -> Iterator[Finding]:
    names = {node: ", ".join(dict.fromkeys(gpu.name for gpu in it.gpus or ())) for node, it in accelerators.items()}
    drivers = {node: str(it.driver) for node, it in accelerators.items()}
    for what, kind, found in (("other GPUs", "GPUs", names), ("another driver", "driver", drivers)):
        head = next(iter(found), "")
        for node, own in found.items():
            if own != found[head]:
                got = f"{own}, {found[head]} on {head}"
                todo = f"choose nodes with the same {kind} (--include), or continue if this is intended"
                yield warn("devices", Problem(node, f"has {what} than the head", got, todo), _SLOWEST)


def _infiniband(node: str, report: NodeReport) -> Iterator[Finding]:
    found = report.infiniband
    why = "NCCL would use TCP, several times slower"
    got = ", ".join(found.devices)
    if found.devices and not found.usable:
        what = "has InfiniBand devices that its container does not see"
        todo = "recreate its container: tridock down, then tridock up"
        yield warn("devices", Problem(node, what, got, todo), why, UP)
    elif found.devices and report.nccl_ib_disable == "1":
        what = "has InfiniBand devices that NCCL_IB_DISABLE=1 leaves unused"
        yield warn("devices", Problem(node, what, got, "remove NCCL_IB_DISABLE from env in the settings"), why)
    elif found.devices and report.accelerators.gpus and not report.accelerators.peer_memory:
        what = "has InfiniBand devices that cannot read its GPUs' memory"
        why = "NCCL copies through the host's memory, without GPUDirect RDMA"
        yield warn("devices", Problem(node, what, got, "load the module there: sudo modprobe nvidia_peermem"), why)


def leftover_findings(
    hosts: str, holders: Mapping[str, Sequence[str]], states: Mapping[str, RunState]
) -> Iterator[Finding]:
    """``holders``: by run, the nodes with its processes. ``--fix`` ends those of runs that are over."""
    for run_id, nodes in holders.items():
        state = states.get(run_id)
        if state is not None and state.is_over and is_run_id(run_id):
            todo = f"end them: tridock stop {hosts} --run {run_id}"
            what = f"has processes of a run that is {state}"
            why = "they hold memory, GPUs and ports that the next run needs"
            for node in nodes:
                yield warn("devices", Problem(node, what, run_id, todo), why, ("stop", run_id))
        else:
            todo = f"wait for its end, or stop it: tridock stop {hosts} --run {run_id}"
            why = "two runs on the same slots share their memory and time"
            yield warn("devices", Problem(", ".join(nodes), "a run continues there", run_id, todo), why)
