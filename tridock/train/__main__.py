"""One rank of engine ``torch``, started by a launcher.

``python -m tridock.train --run-folder <folder>`` of a run whose folder is there; without the word the ranks make one
(:mod:`tridock.train.bench.benchmark`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tridock.train.rank.program import run_program
from tridock.train.rank.run import end

if TYPE_CHECKING:
    from tridock.train.rank.process_group import Ranks
    from tridock.train.trainer import Build


def engine(_ranks: Ranks) -> Build:
    """What makes the parts of the training loop."""
    from tridock.train.trainer import torch_parts

    return torch_parts


def main() -> int:
    """Runs the rank; gives the exit code."""
    if not any(word.startswith("--run-folder") for word in sys.argv[1:]) and not {"-h", "--help"} & set(sys.argv):
        from tridock.train.bench import benchmark

        return benchmark.start(engine, sys.argv[1:])
    return run_program("tridock.train", "torch", engine)


if __name__ == "__main__":
    end(main())
