"""The common part of engines ``torch`` and ``megatron-core``: a rank's command line, and the start of its training."""

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
"""Called once the process group exists: imports the engine's modules, returns the function that builds its parts."""


def run_program(name: str, engine_name: str, engine: Engine) -> int:
    """Parses the command line of a rank and runs the rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=f"One rank of engine {engine_name}.")
    parser.add_argument("--run-folder", type=Path, required=True, help="runs/<run-id>, with experiment.yaml in it")
    parser.add_argument(
        "--workspace", type=Path, help="base of relative paths (default: two folders above the run folder)"
    )
    parser.add_argument("--load", help="checkpoint folder to resume from, instead of train.load of the experiment")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher appends it
    options = parser.parse_args()
    run_folder: Path = options.run_folder.absolute()
    workspace: Path = (options.workspace or run_folder.parent.parent).absolute()
    return run_rank(run_folder, lambda: train(run_folder, workspace, engine, options.load))


def train(run_folder: Path, workspace: Path, engine: Engine, load: str | None) -> None:
    """Joins the process group and trains the experiment of the run folder; ``load`` replaces its ``train.load``."""
    from tridock.experiment import load_experiment
    from tridock.train.rank import process_group
    from tridock.train.rank.device import set_tf32
    from tridock.train.trainer import Trainer

    ranks = form_world(run_folder)
    with process_group.agree_on_errors(ranks):
        # A restart passes it on the command line, so that the run's experiment stays unchanged.
        overrides = () if load is None else (f"train.load={json.dumps(load)}",)
        experiment = load_experiment(run_folder / EXPERIMENT, overrides)
    set_tf32(experiment.train.tf32)
    given = (experiment, run_folder, workspace, ranks, engine(ranks))
    if turns := os.environ.get(environment.TURNS):
        from tridock.train.bench.baseline_loop import BaselineTrainer, Turns

        trainer: Trainer = BaselineTrainer(*given, Turns.parse(turns))
    else:
        trainer = Trainer(*given)
    trainer.run()
    record_end(run_folder, ranks, trainer.progress.iteration)
