"""GPUs and InfiniBand of the nodes against the slots and the image, and who holds the slots. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tridock.cluster import Cluster
from tridock.contracts.node_answers import Accelerators, Gpu, NodeReport, QuickReport
from tridock.contracts.run_folder import is_run_id
from tridock.contracts.run_state import RunState
from tridock.errors import Problem
from tridock.ops.doctor.finding import UP, Finding, Reports, fail, warn

_BUSY_MIB: Final = 1024
"""A driver and a display hold less."""


def cuda_findings(node: str, report: QuickReport) -> Iterator[Finding]:
    """The error of CUDA's driver in an image for GPUs, with which every rank would end."""
    if report.cuda_error:
        todo = "see that nvidia-smi works on the host, then start its container anew: fab down, then fab up"
        problem = Problem(node, "CUDA has no usable GPU in its container", report.cuda_error, todo)
        yield fail("devices", problem, "a rank without a GPU ends at once")


def device_findings(cluster: Cluster, reports: Reports) -> Iterator[Finding]:
    """Slots present and idle, driver and CUDA against the image, the same GPUs everywhere, InfiniBand in use."""
    for node, report in reports.items():
        if report.on_gpus:
            yield from _gpus(cluster, node, report)
        yield from _infiniband(node, report)
    own = {node: report.accelerators for node, report in reports.items() if report.on_gpus}
    yield from _differences({node: accelerators for node, accelerators in own.items() if accelerators.gpus})


def _gpus(cluster: Cluster, node: str, report: NodeReport) -> Iterator[Finding]:
    slots, gpus = cluster.everywhere[node], report.accelerators.gpus
    if not gpus:
        todo = "see that nvidia-smi works on the host and in docker run --gpus all (NVIDIA's container toolkit)"
        problem = Problem(node, "no GPU is visible in its container", report.accelerators.error, todo)
        yield fail("devices", problem, f"its {len(slots)} slots are GPUs")
        return
    missing = [slot for slot in slots if slot >= len(gpus)]
    if missing:
        got = f"{len(gpus)} GPUs, slots {', '.join(map(str, missing))} asked for"
        todo = "correct its slots in the hostfile, or see why nvidia-smi shows fewer there"
        yield fail(
            "devices", Problem(node, "has fewer GPUs than slots", got, todo), "a rank without a GPU ends at once"
        )
    for slot in slots:
        if slot < len(gpus) and (got := _use(gpus[slot])):
            todo = "end what uses it (nvidia-smi there shows it), or leave the slot out with --exclude"
            yield warn(
                "devices", Problem(node, f"GPU {slot} is in use", got, todo), "a rank finds less memory and time"
            )
    yield from cuda_findings(node, report)
    yield from _driver(node, report)


def _use(gpu: Gpu) -> str:
    if gpu.processes:
        return ", ".join(gpu.processes)
    if gpu.used is not None and gpu.used > _BUSY_MIB:
        return f"{gpu.used} of {gpu.total} MiB held by processes that cannot be seen from here"
    return ""


def _driver(node: str, report: NodeReport) -> Iterator[Finding]:
    driver, image = report.accelerators.cuda, report.code.cuda
    if driver is not None and image is not None and int(driver.split(".")[0]) < int(image.split(".")[0]):
        got = f"driver {report.accelerators.driver} for CUDA {driver}, the image has CUDA {image}"
        todo = "install a newer driver there, or build the image on an older base (make image BASE_IMAGE=...)"
        problem = Problem(node, "its driver is too old for the image", got, todo)
        yield fail("devices", problem, "CUDA starts on no GPU there")


def _differences(accelerators: Mapping[str, Accelerators]) -> Iterator[Finding]:
    why = "the slowest GPU sets the pace of all, and the smallest one the memory"
    for what, kind, property_of in (("other GPUs", "GPUs", _names), ("another driver", "driver", _driver_version)):
        head = next(iter(accelerators), None)
        for node, own in accelerators.items():
            assert head is not None
            if property_of(own) != property_of(accelerators[head]):
                got = f"{property_of(own)}, {property_of(accelerators[head])} on {head}"
                todo = f"choose nodes with the same {kind} (--include), or continue if this is intended"
                yield warn("devices", Problem(node, f"has {what} than the head", got, todo), why)


def _names(accelerators: Accelerators) -> str:
    return ", ".join(dict.fromkeys(gpu.name for gpu in accelerators.gpus or ()))


def _driver_version(accelerators: Accelerators) -> str:
    return str(accelerators.driver)


def _infiniband(node: str, report: NodeReport) -> Iterator[Finding]:
    found = report.infiniband
    why = "NCCL would use TCP, several times slower"
    got = ", ".join(found.devices)
    if found.devices and not found.usable:
        what = "has InfiniBand devices that its container does not see"
        todo = "start its container anew: fab down, then fab up"
        yield warn("devices", Problem(node, what, got, todo), why, UP)
    elif found.devices and report.nccl_ib_disable == "1":
        what = "has InfiniBand devices that NCCL_IB_DISABLE=1 leaves unused"
        yield warn("devices", Problem(node, what, got, "remove NCCL_IB_DISABLE from env in the settings"), why)


def leftover_findings(
    hosts: str, holders: Mapping[str, Sequence[str]], states: Mapping[str, RunState]
) -> Iterator[Finding]:
    """``holders`` names the nodes with processes of each run: of a run that is over, ``--fix`` ends them."""
    for run_id, nodes in holders.items():
        state = states.get(run_id)
        if state is not None and state.is_over and is_run_id(run_id):
            todo = f"end them: fab stop --hosts {hosts} --run {run_id}"
            what = f"has processes of a run that is {state}"
            why = "they hold memory, GPUs and ports that the next run needs"
            for node in nodes:
                yield warn("devices", Problem(node, what, run_id, todo), why, ("stop", run_id))
        else:
            todo = f"wait for its end, or stop it: fab stop --hosts {hosts} --run {run_id}"
            why = "two runs on the same slots share their memory and time"
            yield warn("devices", Problem(", ".join(nodes), "a run continues there", run_id, todo), why)
