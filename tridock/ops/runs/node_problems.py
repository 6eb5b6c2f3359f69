"""What a node lacks for a run: packages, CUDA multicast, memory, space on NVMe."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tridock.contracts.node_answers import PreflightAnswer
from tridock.engines import program_of
from tridock.errors import Problem, count
from tridock.experiment import Experiment
from tridock.gpus import MIB
from tridock.plan import Plan
from tridock.plan.memory import GIB, host_memory_of


def node_problems(
    config: Path, experiment: Experiment, plan: Plan, answers: Mapping[str, PreflightAnswer]
) -> Iterator[Problem]:
    """Yields what the nodes of a plan lack."""
    yield from package_problems(config, experiment, answers)
    yield from multicast_problems(config, experiment, answers)
    yield from too_little_memory(config, experiment, plan, {node: it.memory for node, it in answers.items()})
    yield from nvme_problems(config, experiment, plan, answers)


def package_problems(config: Path, experiment: Experiment, answers: Mapping[str, PreflightAnswer]) -> Iterator[Problem]:
    """Yields the packages, and what else, that the image of some node does not have."""
    todo = "leave the field out, or build the image on a base that has it"
    for name, field in program_of(experiment).packages(experiment).items():
        if nodes := [node for node, answer in answers.items() if name in answer.missing_packages]:
            yield Problem(f"{config}: {field}", f"needs the Python package {name}", f"not on {', '.join(nodes)}", todo)
    for it in dict.fromkeys(problem for answer in answers.values() for problem in answer.lacks):
        on = ", ".join(node for node, answer in answers.items() if it in answer.lacks)
        yield replace(it, where=f"{config}: {it.where}", got=f"{it.got} on {on}")


def multicast_problems(
    config: Path, experiment: Experiment, answers: Mapping[str, PreflightAnswer]
) -> Iterator[Problem]:
    """Yields nodes with a GPU that has no CUDA multicast, if the run needs it."""
    nodes = [node for node, answer in answers.items() if answer.multicast is False]
    if program_of(experiment).needs_multicast(experiment) and nodes:
        what, todo = "needs GPUs with CUDA multicast (Hopper and newer, with NVSwitch)", "leave it out"
        yield Problem(f"{config}: parallel.tp_comm_overlap", what, f"none on {', '.join(nodes)}", todo)


def too_little_memory(
    config: Path, experiment: Experiment, plan: Plan, memory: Mapping[str, int | None]
) -> Iterator[Problem]:
    """Yields nodes without enough memory for offloaded states; warns of those that copies of a checkpoint may fill."""
    where = f"{config}: deepspeed.zero_optimization"
    for node, need in host_memory_of(experiment, plan).items():
        if (available := memory.get(node)) is None or available >= need.most:
            continue
        got = f"{available / GIB:.1f} GiB"
        if available < need.least:
            ranks, size = count(need.ranks, "rank"), f"{need.least / GIB:.1f} GiB"
            what = f"the offloaded states of {ranks} need {size} of {node}'s memory"
            yield Problem(where, what, got, "use more nodes, or offload less")
        else:
            what = f"with copies of a checkpoint, offloaded states need {need.most / GIB:.1f} GiB of {node}'s memory"
            print(f"warning: {Problem(where, what, got, 'set train.async_save to false')}", file=sys.stderr)


def nvme_problems(
    config: Path, experiment: Experiment, plan: Plan, answers: Mapping[str, PreflightAnswer]
) -> Iterator[Problem]:
    """Yields nodes on whose NVMe the run's states cannot lie."""
    folders = program_of(experiment).nvme_folders(experiment)
    if not folders:
        return
    need = host_memory_of(experiment, plan)
    for node, answer in answers.items():
        there = [(folder, field, answer.nvme[folder]) for folder, field in folders.items()]
        bad = [(folder, field, found.problem) for folder, field, found in there if found.problem is not None]
        for folder, field, problem in bad:
            todo = "make the folder there, for the user of the nodes, and mount it into them (container.mounts)"
            yield Problem(f"{config}: {field}", f"cannot be written on {node}", f"{folder}: {problem}", todo)
        free = sum({found.device: found.free for *_, found in there}.values())
        first, field = next(iter(folders.items()))
        if (its := need.get(node)) is None:
            continue
        if not bad and free < its.nvme:
            what = f"{count(its.ranks, 'rank')} of {node} need {its.nvme / GIB:.1f} GiB on NVMe"
            got, todo = f"{free / GIB:.1f} GiB free in {first}", "free space, or use more nodes"
            yield Problem(f"{config}: {field}", what, got, todo)
        if answer.memlock is not None and answer.memlock < its.locked:
            what = f"each rank locks {its.locked / MIB:.0f} MiB of {node}'s memory for transfers to NVMe"
            todo = "raise the limit (container.ulimits.memlock), or lower sub_group_size"
            yield Problem(f"{config}: {field}", what, f"a limit of {answer.memlock / MIB:.0f} MiB", todo)
