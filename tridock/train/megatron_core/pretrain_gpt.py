"""A rank of engine ``megatron-core``: ``python -m tridock.train.megatron_core.pretrain_gpt --run-folder <folder>``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tridock.train.program import run_program
from tridock.train.rank.run import end

if TYPE_CHECKING:
    from tridock.train.rank.process_group import Ranks
    from tridock.train.trainer import Build


def engine(ranks: Ranks) -> Build:
    """Prepares this machine for megatron-core; returns the function that builds the parts of the training loop."""
    from tridock.compat import megatron_core
    from tridock.train.rank.process_group import local_ranks

    replaced = megatron_core.prepare(ranks.device.type, local_ranks())
    if ranks.first:
        print("".join(f"compat: {line}\n" for line in replaced), end="", flush=True)

    from tridock.train.megatron_core.model import can_fuse
    from tridock.train.megatron_core.strategy import megatron_core_parts

    if ranks.first and ranks.device.type == "cuda" and not can_fuse("cuda"):
        print("note: biases, dropout and activations are not fused: that needs gcc and Python's headers", flush=True)

    return megatron_core_parts


def main() -> int:
    return run_program("tridock.train.megatron_core.pretrain_gpt", "megatron-core", engine)


if __name__ == "__main__":
    end(main(), at_once=True)
