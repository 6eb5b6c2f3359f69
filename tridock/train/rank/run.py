"""What every engine's rank does around its training: keeps its output, turns what goes wrong into an exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.contracts import heartbeat
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.run_folder import EXIT_PREEMPTED, FLIGHT
from tridock.errors import EXIT_INTERRUPTED, Problem, RunError, TridockError
from tridock.train.rank import signals
from tridock.train.rank.rank_log import RankLog
from tridock.train.rank.slurm_env import place_in_step

if TYPE_CHECKING:
    from tridock.train.rank import process_group


def run_rank(run_folder: Path, program: Callable[[], None]) -> int:
    """Runs the program with its output copied to the rank's log; gives the exit code. To be called first: it forks."""
    os.environ.update(place_in_step(os.environ))
    rank = int(os.environ.get("RANK", "0"))
    log = RankLog.open(run_folder, rank)
    with _watched(run_folder, rank):
        code = _guarded(run_folder, program)
        if code == 0:
            heartbeat.beat(heartbeat.END)
    log.close()
    return code


@contextlib.contextmanager
def _watched(run_folder: Path, rank: int) -> Iterator[None]:
    """Lets the node's watch see how far this rank has come, and ask it for its stacks, deep inside C code too."""
    path = heartbeat.stacks_path(run_folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stacks:
        # Before the pulse: whoever finds that may send the signal, which would end a process that is not ready for it.
        faulthandler.register(heartbeat.STACKS_SIGNAL, stacks, all_threads=True)
        signals.note_usr1()
        heartbeat.start(run_folder, rank)
        yield
        signal.signal(heartbeat.STACKS_SIGNAL, signal.SIG_IGN)  # it ends in peace


def form_world(run_folder: Path) -> process_group.Ranks:
    """Joins this rank with the others; rank 0 records that the run has started, and the world that formed."""
    from tridock.train.rank import process_group

    process_group.record_flights(run_folder / FLIGHT)
    signals.listen(run_folder)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        append_event(run_folder, Event.RUN_STARTED, run=run_folder.name)
    ranks = process_group.join()
    if first:
        append_event(run_folder, Event.WORLD_FORMED, world_size=ranks.world_size, backend=ranks.backend)
    return ranks


def record_end(run_folder: Path, ranks: process_group.Ranks, iteration: int) -> None:
    """Rank 0 records that the run is finished, and what the ranks needed for it. A collective."""
    from tridock.train.rank import process_group

    peaks = process_group.peak_memory_by_rank(ranks)
    if ranks.first:
        device = process_group.device_name(ranks)
        held = {"peak_memory_bytes": max(peaks), "peak_memory_by_rank": peaks}
        append_event(run_folder, Event.RUN_FINISHED, iteration=iteration, device=device, **held)


def end(code: int, at_once: bool = False) -> None:
    """Ends the process where it failed; does nothing where all went well, unless it is to end at once in any case.

    Megatron keeps its process groups to the last, and Gloo's threads in them may abort a process whose work is done.
    """
    if code or at_once:
        # A process group that has lost a rank cannot be taken down in good order; do not wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _guarded(run_folder: Path, program: Callable[[], None]) -> int:
    """Runs, and turns whatever goes wrong into one message and an exit code."""
    rank = os.environ.get("RANK", "0")
    # Imported here: torch takes seconds, and what it prints belongs into the rank's log.
    from tridock.train.rank import process_group

    try:
        program()
    except process_group.Agreed as agreed:
        # Every rank holds it. Rank 0 speaks before any of them leaves: a launcher stops all when the first has gone.
        heartbeat.beat(heartbeat.FAILED, code=agreed.error.exit_code)
        if rank == "0":
            _report(run_folder, rank, agreed.error.exit_code, str(agreed.error), agreed.error.problems, agreed=True)
        _let_go(agreed)
        with contextlib.suppress(RuntimeError):  # a rank that has gone meanwhile
            process_group.barrier()
            process_group.leave()
        return agreed.error.exit_code
    except process_group.Consequence as error:
        _report(run_folder, rank, error.exit_code, f"rank {rank}: {error}", error.problems, consequence=True)
        return error.exit_code
    except TridockError as error:
        _report(run_folder, rank, error.exit_code, f"rank {rank}: {error}", error.problems)
        return error.exit_code
    except KeyboardInterrupt:
        _report(run_folder, rank, EXIT_INTERRUPTED, f"rank {rank}: interrupted", "interrupted", Cause.INTERRUPTED)
        return EXIT_INTERRUPTED
    except signals.Preempted as left:
        return _leave_preempted(run_folder, rank, left)
    except signals.Stopped:
        code = 128 + signal.SIGTERM
        reason = "stopped by SIGTERM"
        _report(run_folder, rank, code, f"rank {rank}: {reason}", reason, Cause.TERMINATED, consequence=True)
        return code
    except RuntimeError as error:
        code = RunError.exit_code
        if (lost := process_group.lost_rank(error)) is None:
            _report_exception(run_folder, rank, error)
        else:
            _report(run_folder, rank, code, f"rank {rank}: {lost}", (lost,), consequence=True)
        return code
    except BaseException as error:  # whatever it is, the launcher needs an exit code
        _report_exception(run_folder, rank, error)
        return RunError.exit_code
    with contextlib.suppress(RuntimeError):  # the work is done; a rank that left first does not undo it
        process_group.leave()
    return 0


def _let_go(error: BaseException) -> None:
    """Drops what the frames of an error hold, the model among it, as long as there is a process group.

    Later DDP's reducer would be the last to hold that: it takes it down without letting go of Python's lock, for which
    Gloo's threads may wait while they are waited for.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _leave_preempted(run_folder: Path, rank: str, left: signals.Preempted) -> int:
    """Every rank is here, and none may go before rank 0 has said why: a launcher stops all when the first has gone."""
    from tridock.train.rank import process_group

    if rank == "0":
        print(f"preempted: {left}", flush=True)
        append_event(run_folder, Event.RUN_PREEMPTED, iteration=left.iteration)
    heartbeat.beat(heartbeat.END)
    _let_go(left)
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
    """Prints why the rank ends and records it: ``reason`` is a text, or the problems of one of Tridock's errors.

    ``consequence=True``: not the run's own failure; another rank has gone or this one was terminated.
    ``agreed=True``: every rank found the same.
    """

    heartbeat.beat(heartbeat.LOST if kind.get("consequence") else heartbeat.FAILED, code=code)
    print(message, file=sys.stderr, flush=True)
    if isinstance(reason, str):
        fields: dict[str, object] = {"cause": cause, "reason": reason}
    else:
        own = next((problem.cause for problem in reason if problem.cause), cause)
        fields = {"cause": own, "reason": "\n".join(map(str, reason)), "problem": reason[0].message}
    append_event(run_folder, Event.RUN_FAILED, rank=int(rank), **fields, **kind)
