"""``python -m tridock.train --run-folder <folder>``: one rank of engine ``torch``, started by a launcher.

The launcher's environment says which rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path

from tridock.errors import EXIT_INTERRUPTED, RunError, TridockError
from tridock.run_folder import EXPERIMENT
from tridock.train.rank_log import RankLog


def main() -> int:
    """Runs the rank; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tridock.train", description="One rank of engine torch.")
    parser.add_argument("--run-folder", type=Path, required=True, help="runs/<run-id>, with experiment.yaml in it")
    parser.add_argument("--workspace", type=Path, help="where relative paths start; two folders above the run's")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher appends it
    options = parser.parse_args()
    run_folder: Path = options.run_folder.absolute()
    workspace: Path = (options.workspace or run_folder.parent.parent).absolute()
    log = RankLog.open(run_folder, int(os.environ.get("RANK", "0")))
    code = _guarded(run_folder, workspace)
    log.close()
    return code


def _guarded(run_folder: Path, workspace: Path) -> int:
    """Runs, and turns whatever goes wrong into one message and an exit code."""
    rank = os.environ.get("RANK", "0")
    # Imported here: torch takes seconds, and what it prints belongs into the rank's log.
    from tridock.train import process_group

    try:
        _train(run_folder, workspace)
    except process_group.Agreed as agreed:
        # Every rank holds it. Rank 0 speaks before any of them leaves: a launcher stops all when the first has gone.
        if rank == "0":
            _report(run_folder, rank, str(agreed.error), str(agreed.error))
        with contextlib.suppress(RuntimeError):  # a rank that has gone meanwhile
            process_group.barrier()
            process_group.leave()
        return agreed.error.exit_code
    except TridockError as error:
        _report(run_folder, rank, f"rank {rank}: {error}", str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _report(run_folder, rank, f"rank {rank}: interrupted", "interrupted")
        return EXIT_INTERRUPTED
    except process_group.Stopped:
        _report(run_folder, rank, f"rank {rank}: stopped by SIGTERM", "stopped by SIGTERM")
        return 128 + signal.SIGTERM
    except RuntimeError as error:
        if (lost := process_group.lost_rank(error)) is None:
            _report(run_folder, rank, f"rank {rank} failed:\n{traceback.format_exc()}", repr(error))
        else:
            _report(run_folder, rank, f"rank {rank}: {lost}", str(lost))
        return RunError.exit_code
    except BaseException as error:  # whatever it is, the launcher needs an exit code
        _report(run_folder, rank, f"rank {rank} failed:\n{traceback.format_exc()}", repr(error))
        return RunError.exit_code
    with contextlib.suppress(RuntimeError):  # the work is done; a rank that left first does not undo it
        process_group.leave()
    return 0


def _train(run_folder: Path, workspace: Path) -> None:
    from tridock.experiment import load_experiment
    from tridock.train import process_group
    from tridock.train.metrics import record_event
    from tridock.train.trainer import Trainer

    process_group.stop_on_sigterm()
    first = os.environ.get("RANK", "0") == "0"
    if first:
        record_event(run_folder, "run_started", run=run_folder.name)
    ranks = process_group.join()
    if first:
        record_event(run_folder, "world_formed", world_size=ranks.world_size, backend=ranks.backend)
    with process_group.together(ranks):
        experiment = load_experiment(run_folder / EXPERIMENT)
    trainer = Trainer(experiment, run_folder, workspace, ranks)
    trainer.run()
    trainer.event("run_finished", iteration=trainer.progress.iteration)


def _report(run_folder: Path, rank: str, message: str, reason: str) -> None:
    from tridock.train.metrics import record_event

    print(message, file=sys.stderr, flush=True)
    record_event(run_folder, "run_failed", rank=int(rank), reason=reason)


if __name__ == "__main__":
    exit_code = main()
    if exit_code:
        # A process group that has lost a rank cannot be taken down in good order; do not wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
