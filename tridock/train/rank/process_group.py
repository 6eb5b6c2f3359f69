"""The ranks: how they find each other, agree on errors, and part."""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from tridock.contracts import environment
from tridock.contracts.events import Cause
from tridock.errors import Problem, RequestError, RunError, TridockError

TIMEOUT_VARIABLE: Final = "DEEPSPEED_TIMEOUT"
"""Minutes to wait for the others in a collective, and at most as long for them to come; DeepSpeed's own variable."""
_DEFAULT_TIMEOUT_MINUTES: Final = 30
_FLIGHT_NAMES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
_OLD_FLIGHT_NAMES: Final = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_NAMES_SINCE: Final = (2, 9)
_MEETING_PATIENCE: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among the others."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def backend(self) -> str:
        """What carries the collectives: gloo or nccl."""
        return str(dist.get_backend())

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0


def choose_device(local_rank: int) -> torch.device:
    """The rank's accelerator, or the CPU where there is none or ``DS_ACCELERATOR=cpu`` asks for it."""
    if os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported: it would warn and probe
    return torch.device("cpu")


def join() -> Ranks:
    """Joins the ranks that the launcher's environment names; a process started alone is a world of one.

    Raises :class:`RunError` where the others do not come, or where another world formed than the planned one
    (a launcher that did not find its hostfile trains on one machine, in silence).
    """
    environment = os.environ
    environment.setdefault("RANK", "0")
    environment.setdefault("LOCAL_RANK", "0")
    environment.setdefault("WORLD_SIZE", "1")
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in environment:
        environment["MASTER_PORT"] = str(_free_port() if environment["WORLD_SIZE"] == "1" else 29500)
    rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    device = choose_device(local_rank)
    patience = timedelta(minutes=float(environment.get(TIMEOUT_VARIABLE) or _DEFAULT_TIMEOUT_MINUTES))
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        # Two steps, because a rank that never starts should not be waited for as long as one that writes a checkpoint.
        store, rank, world_size = next(dist.rendezvous("env://", timeout=min(patience, _MEETING_PATIENCE)))
        store.set_timeout(patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
    except (dist.DistError, RuntimeError, ValueError) as error:
        meeting = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        what = f"the {environment['WORLD_SIZE']} ranks did not all meet at {meeting}"
        todo = "see the launcher's log for nodes that did not start, and that every node reaches this address"
        got = str(error).strip().splitlines()[0].rstrip(".")
        raise RunError(Problem("rendezvous", what, got, todo, cause=Cause.RENDEZVOUS_FAILED)) from None
    ranks = Ranks(rank, local_rank, dist.get_world_size(), device)
    check_world(ranks)
    return ranks


def record_flights(prefix: Path) -> None:
    """Asks NCCL's process groups to keep their last collectives, and to write them to a file a rank on a timeout.

    To be called before they are made; does nothing without GPUs. Variables that are set already stay as they are.
    """
    if not torch.cuda.is_available():
        return
    # Torch warns of the names of before where it knows those of today.
    old = tuple(int(number) for number in torch.__version__.split(".")[:2]) < _FLIGHT_NAMES_SINCE
    size, file = _OLD_FLIGHT_NAMES if old else _FLIGHT_NAMES
    for name, value in {size: "2000", file: str(prefix), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}.items():
        os.environ.setdefault(name, value)


def check_world(ranks: Ranks) -> None:
    """Compares the world that formed with the planned one, if the launcher said how many ranks were planned."""
    planned = os.environ.get(environment.WORLD_SIZE)
    if planned is not None and int(planned) != ranks.world_size:
        todo = "check the hostfile that the launcher read (logs/launcher.log) and that every node started its ranks"
        what = f"the plan has {planned} ranks, but another number found each other"
        raise Agreed(RunError(Problem("world size", what, str(ranks.world_size), todo)))


class Agreed(Exception):
    """An error that every rank holds alike; only rank 0 shows it."""

    def __init__(self, error: TridockError) -> None:
        super().__init__(str(error))
        self.error = error


class Consequence(RunError):
    """What another rank's failure comes to on this one: that rank's message is the run's."""


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """What any rank finds wrong inside stops all of them, with one list of problems.

    A collective: every rank has to enter and leave it.
    """
    error: TridockError | None = None
    try:
        yield
    except TridockError as found:
        error = found
    reports: list[tuple[int, tuple[Problem, ...]] | None] = [None] * ranks.world_size
    dist.all_gather_object(reports, (error.exit_code, error.problems) if error else None)
    holders: dict[Problem, list[int]] = {}
    for rank, report in enumerate(reports):
        for problem in report[1] if report else ():
            holders.setdefault(problem, []).append(rank)
    if not holders:
        return
    problems = [_located(problem, found_by, ranks.world_size) for problem, found_by in holders.items()]
    worst = max(report[0] for report in reports if report)
    raise Agreed((RunError if worst == RunError.exit_code else RequestError)(problems))


def _located(problem: Problem, found_by: list[int], world_size: int) -> Problem:
    if len(found_by) == world_size:
        return problem
    who = f"rank {found_by[0]}" if len(found_by) == 1 else f"ranks {', '.join(str(rank) for rank in found_by)}"
    return replace(problem, where=f"{who}: {problem.where}")


def barrier() -> None:
    """Waits for every rank."""
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a scalar over the ranks, on all of them."""
    total = value.detach().to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def any_rank(ranks: Ranks, here: bool) -> bool:
    """Whether something is so on any rank. A collective of four bytes."""
    flag = torch.tensor([here], dtype=torch.int32, device=ranks.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def peak_memory_by_rank(ranks: Ranks) -> list[int]:
    """The most bytes that each rank held at once: of the GPU's memory torch's part, else the process's own.

    A collective of eight bytes a rank.
    """
    if ranks.device.type == "cuda":
        held = torch.cuda.max_memory_allocated()
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = torch.zeros(ranks.world_size, dtype=torch.int64, device=ranks.device)
    peaks[ranks.rank] = held
    dist.all_reduce(peaks)
    return [int(peak) for peak in peaks.tolist()]


class Memory:
    """The ranks' peaks over a run, told with the first logged iteration, the second, the fourth, and so on: they rise
    early if ever, of a thousand ranks each line is long, and every telling is a collective."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._logged = 0

    def told(self) -> dict[str, list[int]]:
        """``memory_bytes`` by rank, or nothing. To be called by all ranks with each iteration that is logged."""
        self._logged += 1
        is_power_of_two = self._logged & (self._logged - 1) == 0
        return {"memory_bytes": peak_memory_by_rank(self._ranks)} if is_power_of_two else {}


def device_name(ranks: Ranks) -> str:
    """The GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"


def lost_rank(error: RuntimeError) -> Problem | None:
    """What to say where a collective failed because another rank has gone; None for any other error.

    The trace of such an error leads nowhere, and would bury the message of the rank that failed first.
    """
    first_line = str(error).strip().partition("\n")[0]
    marks = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "remote process exited")
    if not isinstance(error, dist.DistBackendError) and not any(mark in str(error) for mark in marks):
        return None
    got = first_line.rpartition("pair.cc:")[2].partition("] ")[2] or first_line
    got = got.partition(". This is typically")[0]
    todo = "look for the rank that failed first: its message stands in logs/rank-<N>.log"
    return Problem("collective", "another rank has gone", got, todo, cause=Cause.PEER_LOST)


def leave() -> None:
    """Takes the process group down. Without it a process that has done its work can abort while it exits.

    A DDP model must have gone before: its reducer, the last to hold the group, would wait for Gloo's threads with
    Python's lock in hand, and they for the lock.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
