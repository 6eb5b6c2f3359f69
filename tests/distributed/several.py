"""Trains the runs whose folders are given, one after another, as one rank of a world that stays.

All of one engine; the first run's experiment says which.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tridock.experiment import load_experiment
from tridock.train import __main__ as torch_program
from tridock.train.megatron_core import pretrain_gpt
from tridock.train.rank import process_group
from tridock.train.rank.run import end
from tridock.train.trainer import Trainer


def main() -> None:
    """Joins once, trains all."""
    ranks = process_group.join()
    folders = [Path(word) for word in sys.argv[1:]]
    experiments = [load_experiment(folder / "experiment.yaml") for folder in folders]
    core = experiments[0].engine == "megatron-core"
    build = (pretrain_gpt if core else torch_program).engine(ranks)
    for folder, experiment in zip(folders, experiments, strict=True):
        Trainer(experiment, folder, folder.parent.parent, ranks, build).run()
    process_group.leave()
    end(0, at_once=True)  # how a single process ends is tested elsewhere


if __name__ == "__main__":
    main()
