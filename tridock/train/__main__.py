"""One rank of engine ``torch``: ``python -m tridock.train --run-folder <folder>``, started by a launcher.

Without the option, under torchrun, the ranks create the run folder (:mod:`tridock.train.bench.benchmark`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tridock.train.program import run_program
from tridock.train.rank.run import end

if TYPE_CHECKING:
    from tridock.train.rank.process_group import Ranks
    from tridock.train.trainer import Build


def engine(_ranks: Ranks) -> Build:
    """Returns the function that builds the parts of the training loop."""
    from tridock.train.trainer import torch_parts

    return torch_parts


def main() -> int:
    if not any(it.startswith("--run-folder") for it in sys.argv[1:]) and not {"-h", "--help"} & set(sys.argv):
        from tridock.train.bench import benchmark

        return benchmark.start(engine, sys.argv[1:])
    return run_program("tridock.train", "torch", engine)


if __name__ == "__main__":
    end(main())
