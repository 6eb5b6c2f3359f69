"""Two ranks: the first sends files from its folder to the second's; each prints what went wrong."""

import hashlib
import sys
from pathlib import Path

import torch.distributed as dist

from tridock.contracts.checkpoint_files import Entry
from tridock.errors import RunError
from tridock.train.checkpoints.exchange import exchange, group_of, transfers
from tridock.train.rank.process_group import join, leave


def entry(content: bytes) -> Entry:
    return Entry(len(content), hashlib.sha256(content).hexdigest())


LARGE = bytes(range(256)) * 300_000
"""More than two chunks."""
FILES = {"whole": LARGE, "empty": b"", "deep/er": b"here", "changed": b"before", "short": b"longer", "gone": b"x"}
THERE = FILES | {"changed": b"behind", "short": b"long"}

if __name__ == "__main__":
    ranks = join()
    folder = Path(sys.argv[1 + ranks.rank])
    if ranks.first:
        for name, content in THERE.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name != "gone":
                (folder / name).write_bytes(content)
    have = {0: {name: entry(content) for name, content in (FILES | {"in/the": b"way"}).items()}, 1: {}}
    moved = transfers(have, {0: set(), 1: {*have[0], "nowhere"}})
    group = group_of(moved)
    dist.barrier()
    try:
        exchange(folder, moved, ranks, group)
    except RunError as error:
        print(error)
    leave()
