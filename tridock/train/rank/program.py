"""What the programs of the engines ``torch`` and ``megatron-core`` have in common: one rank, started by a launcher.

The launcher's environment says which rank: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tridock.contracts import environment
from tridock.contracts.run_folder import EXPERIMENT
from tridock.train.rank.run import form_world, record_end, run_rank

if TYPE_CHECKING:
    from tridock.train.rank.process_group import Ranks
    from tridock.train.trainer import Build

Engine = Callable[["Ranks"], "Build"]
"""Called once the ranks have met: imports what the engine needs, and gives what makes its parts."""


def run_program(name: str, engine_name: str, engine: Engine) -> int:
    """Runs the rank; gives the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=f"One rank of engine {engine_name}.")
    parser.add_argument("--run-folder", type=Path, required=True, help="runs/<run-id>, with experiment.yaml in it")
    parser.add_argument("--workspace", type=Path, help="where relative paths start; two folders above the run's")
    parser.add_argument("--load", help="checkpoints to continue from, in place of the experiment's train.load")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher appends it
    options = parser.parse_args()
    run_folder: Path = options.run_folder.absolute()
    workspace: Path = (options.workspace or run_folder.parent.parent).absolute()
    return run_rank(run_folder, lambda: train(run_folder, workspace, engine, options.load))


def train(run_folder: Path, workspace: Path, engine: Engine, load: str | None) -> None:
    """Forms the world and trains what the run's folder says, or goes on from the checkpoints ``load``."""
    from tridock.experiment import load_experiment
    from tridock.train.rank import process_group
    from tridock.train.trainer import Trainer

    ranks = form_world(run_folder)
    with process_group.together(ranks):
        # A restart's is on its command line: the run's experiment stays what it was.
        overrides = () if load is None else (f"train.load={json.dumps(load)}",)
        experiment = load_experiment(run_folder / EXPERIMENT, overrides)
    given = (experiment, run_folder, workspace, ranks, engine(ranks))
    if turns := os.environ.get(environment.TURNS):
        from tridock.train.bench.baseline_loop import BesideBare, Turns

        trainer: Trainer = BesideBare(*given, Turns.parse(turns))
    else:
        trainer = Trainer(*given)
    trainer.run()
    record_end(run_folder, ranks, trainer.progress.iteration)
