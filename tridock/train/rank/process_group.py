"""The process group: ranks join it, agree on errors, and leave it."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from tridock.contracts import environment
from tridock.contracts.events import Cause
from tridock.errors import Problem, RequestError, RunError, TridockError
from tridock.train.rank.device import choose_device

_DEFAULT_TIMEOUT_MINUTES: Final = 30
_RECORDER_VARIABLES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
_OLD_RECORDER_VARIABLES: Final = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RECORDER_VARIABLES_SINCE: Final = (2, 9)
_PIPES_READ_THEM_SINCE: Final = (2, 11)
_RENDEZVOUS_TIMEOUT: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank, its device, and the size of the world."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """The process group of the collectives that are given these ranks; None for the default group."""

    @property
    def backend(self) -> str:
        """The backend of the collectives: gloo or nccl."""
        return str(dist.get_backend())

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and records for all."""
        return self.rank == 0

    def in_background(self) -> Ranks:
        """Returns these ranks with a Gloo group of their own, for collectives of another thread. A collective."""
        return replace(self, device=torch.device("cpu"), group=dist.new_group(backend="gloo"))


def join() -> Ranks:
    """Joins the process group that the launcher's environment describes; a process started alone is a world of one.

    Raises :class:`RunError` if the rank has no GPU or not all ranks join, and :class:`AgreedError` if the world has
    another size than planned: a launcher that does not find its hostfile would silently train on one machine.
    """
    environment = os.environ
    environment.setdefault("RANK", "0")
    environment.setdefault("LOCAL_RANK", "0")
    environment.setdefault("WORLD_SIZE", "1")
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in environment:
        environment["MASTER_PORT"] = "0" if environment["WORLD_SIZE"] == "1" else "29500"  # 0: any free port
    rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    device = choose_device(local_rank)
    timeout = collective_timeout()
    # torch gives every further group these, and not the first one's; as do DeepSpeed, DeviceMesh and v1.1.5.
    defaults: Any = dist.distributed_c10d
    defaults.default_pg_timeout = defaults.default_pg_nccl_timeout = timeout
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        # Two steps: a rank that never starts gets a shorter timeout than one that writes a checkpoint.
        store, rank, world_size = next(dist.rendezvous("env://", timeout=min(timeout, _RENDEZVOUS_TIMEOUT)))
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except dist.DistBackendError:
        raise  # NCCL's message names the problem
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        what = f"not all {environment['WORLD_SIZE']} ranks joined at {address}"
        todo = "see the launcher's log for nodes that did not start, and that every node reaches this address"
        got = str(error).strip().splitlines()[0].rstrip(".")
        raise RunError(Problem("rendezvous", what, got, todo, cause=Cause.RENDEZVOUS_FAILED)) from None
    ranks = Ranks(rank, local_rank, dist.get_world_size(), device)
    check_world(ranks)
    return ranks


def collective_timeout() -> timedelta:
    """Returns the timeout of this rank's collectives: the launch's, or that of the user's experiment."""
    return timedelta(minutes=float(os.environ.get(environment.COLLECTIVE_TIMEOUT) or _DEFAULT_TIMEOUT_MINUTES))


def enable_flight_recorder(prefix: Path, pipes: Path) -> None:
    """Enables torch's flight recorder: it writes the rank's last collectives to ``<prefix><rank>`` on NCCL's timeout,
    and when something is written to the named pipe ``<pipes><rank>.pipe``.

    Call it before process groups exist. Removes what the rank wrote in an attempt before. Does nothing without GPUs;
    keeps variables that are already set.
    """
    if not torch.cuda.is_available():
        return
    rank = os.environ.get("RANK", "0")
    Path(f"{prefix}{rank}").unlink(missing_ok=True)
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    # Torch warns of the old names if it knows the new ones.
    size, file = _OLD_RECORDER_VARIABLES if version < _RECORDER_VARIABLES_SINCE else _RECORDER_VARIABLES
    values = {size: "2000", file: str(prefix), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if _can_make_pipe(Path(f"{pipes}{rank}.pipe")):
        values["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(pipes)
        if version < _PIPES_READ_THEM_SINCE:  # without the old name of the size there is no pipe: worth a warning
            values[_OLD_RECORDER_VARIABLES[0]] = values[size]
    for name, value in values.items():
        os.environ.setdefault(name, value)


def _can_make_pipe(path: Path) -> bool:
    """Whether the file system has named pipes: torch ends the process where it cannot make its own."""
    try:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        path.unlink()
    except OSError:
        return False
    return True


def check_world(ranks: Ranks) -> None:
    """Raises :class:`AgreedError` if the world size differs from the planned one, if the launcher set that."""
    planned = os.environ.get(environment.WORLD_SIZE)
    if planned is not None and int(planned) != ranks.world_size:
        todo = "check the hostfile that the launcher read (logs/launcher.log) and that every node started its ranks"
        what = f"the plan has {planned} ranks, but another number found each other"
        raise AgreedError(RunError(Problem("world size", what, str(ranks.world_size), todo)))


class AgreedError(Exception):
    """An error that every rank has raised with the same content; only rank 0 prints it."""

    def __init__(self, error: TridockError) -> None:
        super().__init__(str(error))
        self.error = error


class LostRankError(RunError):
    """Another rank has failed, and its message, not this one, explains the end of the run."""


@contextmanager
def agree_on_errors(ranks: Ranks) -> Iterator[None]:
    """Makes an error on any rank inside the block an error on all: each raises :class:`AgreedError` with all problems.

    A collective: every rank must enter and leave the block.
    """
    error: TridockError | None = None
    try:
        yield
    except TridockError as found:
        error = found
    reports: list[tuple[int, tuple[Problem, ...]] | None] = [None] * ranks.world_size
    dist.all_gather_object(reports, (error.exit_code, error.problems) if error else None, group=ranks.group)
    holders: dict[Problem, list[int]] = {}
    for rank, report in enumerate(reports):
        for problem in report[1] if report else ():
            holders.setdefault(problem, []).append(rank)
    if not holders:
        return
    problems = [_located(problem, found_by, ranks.world_size) for problem, found_by in holders.items()]
    worst = max(report[0] for report in reports if report)
    raise AgreedError((RunError if worst == RunError.exit_code else RequestError)(problems))


def _located(problem: Problem, found_by: list[int], world_size: int) -> Problem:
    if len(found_by) == world_size:
        return problem
    who = f"rank {found_by[0]}" if len(found_by) == 1 else f"ranks {', '.join(str(rank) for rank in found_by)}"
    return replace(problem, where=f"{who}: {problem.where}")


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Waits for all ranks of the group. A collective."""
    if dist.get_backend(group) == "nccl":
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier(group)


def mean_over_ranks(value: torch.Tensor) -> float:
    """Returns the mean of a scalar over the ranks, on all of them. A collective."""
    total = value.detach().to(torch.float32, copy=True)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def any_rank(ranks: Ranks, here: bool) -> bool:
    """Whether the flag is true on any rank. A collective of four bytes."""
    flag = torch.tensor([here], dtype=torch.int32, device=ranks.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


class AnyRank:
    """Returns whether the previous call's flag was true on any rank. Every call is a collective of four bytes.

    The flags are reduced during the next step, so no rank waits for its device or for another rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._device = ranks.device
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._result: Callable[[], bool] = lambda: False

    def __call__(self, here: bool) -> bool:
        result, self._result = self._result, self._start(here)
        return result()

    def _start(self, here: bool) -> Callable[[], bool]:
        if self._stream is None:
            flag = torch.full((), int(here), dtype=torch.int32)
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
            return lambda: bool(work.wait()) and bool(flag)
        with torch.cuda.stream(self._stream):  # its own stream neither waits for the step nor delays it
            flag = torch.full((), int(here), dtype=torch.int32, device=self._device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            on_host = torch.empty((), dtype=torch.int32, pin_memory=True).copy_(flag, non_blocking=True)
            arrived = self._stream.record_event()

        def result() -> bool:
            arrived.synchronize()  # already reached during the step
            return bool(on_host)

        return result


def peak_memory_by_rank(ranks: Ranks) -> list[int]:
    """Returns the peak memory of each rank in bytes: torch's allocations on the GPU, or the process's resident set.

    A collective of eight bytes per rank.
    """
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = torch.zeros(ranks.world_size, dtype=torch.int64, device=ranks.device)
    peaks[ranks.rank] = peak
    dist.all_reduce(peaks)
    return [int(peak) for peak in peaks.tolist()]


class PeakMemory:
    """Adds peak memory by rank to the metrics of the 1st, 2nd, 4th, 8th, … logged iteration.

    Peaks rise early if at all; each report is a collective, and a long line with many ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._logged = 0

    def metrics(self) -> dict[str, list[int]]:
        """Returns ``memory_bytes`` by rank, or nothing. Call it on all ranks at each logged iteration."""
        self._logged += 1
        is_power_of_two = self._logged & (self._logged - 1) == 0
        return {"memory_bytes": peak_memory_by_rank(self._ranks)} if is_power_of_two else {}


def local_ranks() -> int:
    """Returns the number of ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or dist.get_world_size())


def device_name(ranks: Ranks) -> str:
    """Returns the GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"


def leave() -> None:
    """Destroys the process group; otherwise a finished process may abort at exit.

    Gloo's threads are waited for with the GIL held, and may wait for the GIL themselves. So DDP models, whose reducers
    hold references to the group, must be freed before, and these threads get time to free the last tensors.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        time.sleep(0.05)
        dist.destroy_process_group()
