"""``python -m tridock.train --run-folder <folder>``: one rank of engine ``torch``, started by a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tridock.train.program import run_program
from tridock.train.rank import end

if TYPE_CHECKING:
    from tridock.train.process_group import Ranks
    from tridock.train.trainer import Build


def engine(_ranks: Ranks) -> Build:
    """What makes the parts of the training loop."""
    from tridock.train.trainer import torch_parts

    return torch_parts


def main() -> int:
    """Runs the rank; gives the exit code."""
    return run_program("tridock.train", "torch", engine)


if __name__ == "__main__":
    end(main())
