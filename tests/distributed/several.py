"""Trains the runs whose folders are given, one after another, as one rank of a world that stays."""

from __future__ import annotations

import sys
from pathlib import Path

from tridock.experiment import load_experiment
from tridock.train import process_group
from tridock.train.trainer import Trainer


def main() -> None:
    """Joins once, trains all."""
    ranks = process_group.join()
    for word in sys.argv[1:]:
        folder = Path(word)
        Trainer(load_experiment(folder / "experiment.yaml"), folder, folder.parent.parent, ranks).run()
    process_group.leave()


if __name__ == "__main__":
    main()
