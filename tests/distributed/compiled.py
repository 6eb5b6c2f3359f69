"""As ``several``: trains the runs whose folders are given, and writes down what torch has compiled for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from tridock.experiment import load_experiment
from tridock.train import __main__ as torch_program
from tridock.train.rank import process_group
from tridock.train.rank.run import end
from tridock.train.trainer import Trainer


def main() -> None:
    """Joins once, trains all; ``graphs-<rank>.json`` of each run counts its graphs and the breaks between them."""
    ranks = process_group.join()
    for folder in map(Path, sys.argv[1:]):
        torch._dynamo.reset()
        counters.clear()
        experiment = load_experiment(folder / "experiment.yaml")
        Trainer(experiment, folder, folder.parent.parent, ranks, torch_program.engine(ranks)).run()
        found = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
        (folder / f"graphs-{ranks.rank}.json").write_text(json.dumps(found))
    process_group.leave()
    end(0, at_once=True)


if __name__ == "__main__":
    main()
