"""Builds the runs whose folders are given, one after another, as one rank of a world that stays.

Prints this rank's peak memory until each run was ready for its first step, in bytes: ``{run: bytes}``.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from tests.memory.ledger import Ledger, Place
from tridock.experiment import load_experiment
from tridock.train import __main__ as torch_program
from tridock.train.megatron_core import pretrain_gpt
from tridock.train.rank import process_group
from tridock.train.rank.run import end
from tridock.train.trainer import Trainer


def main() -> None:
    ranks = process_group.join()
    folders = [Path(word) for word in sys.argv[1:]]
    experiments = [load_experiment(folder / "experiment.yaml") for folder in folders]
    build = (pretrain_gpt if experiments[0].engine == "megatron-core" else torch_program).engine(ranks)
    peaks = {}
    for folder, experiment in zip(folders, experiments, strict=True):
        gc.collect()
        with Ledger(Place()) as ledger:
            Trainer(experiment, folder, folder.parent.parent, ranks, build)
        peaks[folder.name] = ledger.peak
    print(json.dumps(peaks), flush=True)
    process_group.leave()
    end(0, at_once=True)


if __name__ == "__main__":
    main()
