"""``python -m tridock.train --run-folder <folder>``: one rank of engine ``torch``, started by a launcher.

The launcher's environment says which rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tridock.run_folder import EXPERIMENT
from tridock.train.rank import end, form_world, run_rank


def main() -> int:
    """Runs the rank; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tridock.train", description="One rank of engine torch.")
    parser.add_argument("--run-folder", type=Path, required=True, help="runs/<run-id>, with experiment.yaml in it")
    parser.add_argument("--workspace", type=Path, help="where relative paths start; two folders above the run's")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher appends it
    options = parser.parse_args()
    run_folder: Path = options.run_folder.absolute()
    workspace: Path = (options.workspace or run_folder.parent.parent).absolute()
    return run_rank(run_folder, lambda: _train(run_folder, workspace))


def _train(run_folder: Path, workspace: Path) -> None:
    from tridock.experiment import load_experiment
    from tridock.train import process_group
    from tridock.train.trainer import Trainer

    ranks = form_world(run_folder)
    with process_group.together(ranks):
        experiment = load_experiment(run_folder / EXPERIMENT)
    trainer = Trainer(experiment, run_folder, workspace, ranks)
    trainer.run()
    trainer.event("run_finished", iteration=trainer.progress.iteration)


if __name__ == "__main__":
    end(main())
