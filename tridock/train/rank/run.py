"""Runs one rank of any engine, from its environment to its exit code.

The launcher's environment identifies the rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.contracts import appends, environment, heartbeat
from tridock.contracts.devices import rank_devices
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.run_folder import EXIT_PREEMPTED, FLIGHT
from tridock.errors import EXIT_INTERRUPTED, Problem, RunError, TridockError
from tridock.train.rank import signals
from tridock.train.rank.rank_log import RankLog

if TYPE_CHECKING:
    from tridock.train.rank.process_group import Ranks


_ROOM_S: Final = 60.0
"""Seconds that a finished run waits for space on a full disk, to record its end."""


def run_rank(run_folder: Path, program: Callable[[], None]) -> int:
    """Runs the program and copies its output to the rank's log; returns the exit code. Call it first: it forks."""
    os.environ.update(slurm_rank_env(os.environ))
    os.environ.update(rank_devices(os.environ))
    os.environ.pop(environment.DEVICES, None)
    rank = int(os.environ.get("RANK", "0"))
    log = RankLog.open(run_folder, rank)
    with _heartbeat(run_folder, rank):
        code = _run_guarded(run_folder, program)
        if not appends.flush(_ROOM_S if code == 0 else 0.0):
            print(f"rank {rank}: its last events and metrics are lost: no space in {run_folder}", file=sys.stderr)
        if code == 0:
            heartbeat.beat(heartbeat.END)
    log.close()
    return code


@contextlib.contextmanager
def _heartbeat(run_folder: Path, rank: int) -> Iterator[None]:
    """Writes the rank's heartbeat, and its stacks when the node agent requests them, even inside C code."""
    path = heartbeat.stacks_path(run_folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stacks:
        # Before the first heartbeat: the agent may then send the signal, which kills a process without a handler.
        faulthandler.register(heartbeat.STACKS_SIGNAL, stacks, all_threads=True)
        signals.handle_sigusr1()
        heartbeat.start(run_folder, rank)
        yield
        signal.signal(heartbeat.STACKS_SIGNAL, signal.SIG_IGN)  # a late signal must not end the process
        with contextlib.suppress(OSError):  # torch makes it on GPUs, and leaves it
            Path(f"{run_folder / heartbeat.FLIGHT_PIPES}{rank}.pipe").unlink()


def form_world(run_folder: Path) -> Ranks:
    """Joins the process group; rank 0 records ``run_started`` and ``world_formed``."""
    from tridock.train.rank import process_group

    process_group.enable_flight_recorder(run_folder / FLIGHT, run_folder / heartbeat.FLIGHT_PIPES)
    signals.listen(run_folder)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        append_event(run_folder, Event.RUN_STARTED, run=run_folder.name)
    ranks = process_group.join()
    if first:
        append_event(run_folder, Event.WORLD_FORMED, world_size=ranks.world_size, backend=ranks.backend)
    return ranks


def record_end(run_folder: Path, ranks: Ranks, iteration: int) -> None:
    """Rank 0 records ``run_finished`` with the peak memory of the ranks. A collective."""
    from tridock.train.rank import process_group

    peaks = process_group.peak_memory_by_rank(ranks)
    if ranks.first:
        device = process_group.device_name(ranks)
        memory = {"peak_memory_bytes": max(peaks), "peak_memory_by_rank": peaks}
        append_event(run_folder, Event.RUN_FINISHED, iteration=iteration, device=device, **memory)


def end(code: int, at_once: bool = False) -> None:
    """Ends the process without cleanup if it failed, or always if ``at_once``; otherwise does nothing.

    Megatron keeps its process groups until the end, and Gloo's threads may then abort a finished process.
    """
    if code or at_once:
        # A process group that has lost a rank cannot be destroyed cleanly; do not wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_guarded(run_folder: Path, program: Callable[[], None]) -> int:
    """Runs the program; turns every error into one message and an exit code, which it returns."""
    rank = os.environ.get("RANK", "0")
    # Imported here: torch takes seconds, and its output belongs in the rank's log.
    from tridock.train.rank import process_group
    from tridock.train.rank.collective_errors import collective_error

    try:
        program()
    except process_group.AgreedError as agreed:
        # Every rank has this error. Rank 0 reports it before any rank exits, because then the launcher stops all.
        heartbeat.beat(heartbeat.FAILED, code=agreed.error.exit_code)
        if rank == "0":
            _report(run_folder, rank, agreed.error.exit_code, str(agreed.error), agreed.error.problems, agreed=True)
        _clear_frames(agreed)
        with contextlib.suppress(RuntimeError):  # another rank has exited meanwhile
            process_group.barrier()
            process_group.leave()
        return agreed.error.exit_code
    except process_group.LostRankError as error:
        _report(run_folder, rank, error.exit_code, f"rank {rank}: {error}", error.problems, consequence=True)
        return error.exit_code
    except TridockError as error:
        _report(run_folder, rank, error.exit_code, f"rank {rank}: {error}", error.problems)
        return error.exit_code
    except KeyboardInterrupt:
        _report(run_folder, rank, EXIT_INTERRUPTED, f"rank {rank}: interrupted", "interrupted", Cause.INTERRUPTED)
        return EXIT_INTERRUPTED
    except signals.Preempted as preempted:
        return _leave_preempted(run_folder, rank, preempted)
    except signals.Stopped:
        code = 128 + signal.SIGTERM
        reason = "stopped by SIGTERM"
        _report(run_folder, rank, code, f"rank {rank}: {reason}", reason, Cause.TERMINATED, consequence=True)
        return code
    except RuntimeError as error:
        code = RunError.exit_code
        if (problem := collective_error(error)) is None:
            _report_exception(run_folder, rank, error)
        else:
            kind = {"consequence": True} if problem.cause == Cause.PEER_LOST else {}
            _report(run_folder, rank, code, f"rank {rank}: {problem}", (problem,), Cause.REFUSED, **kind)
        return code
    except BaseException as error:  # the launcher needs an exit code after any error
        _report_exception(run_folder, rank, error)
        return RunError.exit_code
    with contextlib.suppress(RuntimeError):  # the work is done; a rank that left first does not undo it
        process_group.leave()
    return 0


def _clear_frames(error: BaseException) -> None:
    """Clears the frames of an error, to release objects such as the model while the process group still exists.

    Otherwise DDP's reducer has the last reference to the group and destroys it with the GIL held: a deadlock with
    Gloo's threads, which wait for the GIL.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _leave_preempted(run_folder: Path, rank: str, preempted: signals.Preempted) -> int:
    """Reports the preemption on rank 0; returns the exit code. No rank exits before that, because then the launcher
    stops all. Call it on every rank."""
    from tridock.train.rank import process_group

    if rank == "0":
        print(f"preempted: {preempted}", flush=True)
        append_event(run_folder, Event.RUN_PREEMPTED, iteration=preempted.iteration)
    heartbeat.beat(heartbeat.END)
    _clear_frames(preempted)
    with contextlib.suppress(RuntimeError):
        process_group.barrier()
        process_group.leave()
    return EXIT_PREEMPTED


def _report_exception(run_folder: Path, rank: str, error: BaseException) -> None:
    from tridock.train.checkpoints.pickles import ForeignObjectError

    cause = Cause.CHECKPOINT_FOREIGN_OBJECT if isinstance(error, ForeignObjectError) else Cause.EXCEPTION
    _report(run_folder, rank, RunError.exit_code, f"rank {rank} failed:\n{traceback.format_exc()}", repr(error), cause)


def _report(
    run_folder: Path,
    rank: str,
    code: int,
    message: str,
    reason: str | tuple[Problem, ...],
    cause: Cause = Cause.REFUSED,
    **kind: bool,
) -> None:
    """Prints and records why the rank ends; ``reason`` is a text, or the problems of a Tridock error.

    ``consequence=True`` marks the consequence of another failure: a lost rank, or termination. ``agreed=True`` marks an
    error that every rank found.
    """

    heartbeat.beat(heartbeat.LOST if kind.get("consequence") else heartbeat.FAILED, code=code)
    print(message, file=sys.stderr, flush=True)
    if isinstance(reason, str):
        fields: dict[str, object] = {"cause": cause, "reason": reason}
    else:
        own = next((problem.cause for problem in reason if problem.cause), cause)
        fields = {"cause": own, "reason": "\n".join(map(str, reason)), "problem": reason[0].message}
    append_event(run_folder, Event.RUN_FAILED, rank=int(rank), **fields, **kind)


def slurm_rank_env(env: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of a task started by ``srun``, from Slurm's variables.

    Empty if a launcher has set them, or if the number of tasks is not the run's number of ranks: every shell in a job
    has Slurm's variables.
    """
    if "RANK" in env or "SLURM_PROCID" not in env or env.get("SLURM_NTASKS") != env.get(environment.WORLD_SIZE):
        return {}
    tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    node = int(env.get("SLURM_NODEID", "0"))
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(tasks[node] if node < len(tasks) else 1),
    }


def _tasks_per_node(text: str) -> list[int]:
    """Parses ``2(x3),1``: two on each of three nodes, one on the fourth."""
    return [int(found[1]) for found in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(found[2] or 1))]
