"""The maps of samples that Megatron v1.1.5 keeps beside the data (``<data>_train_indexmap_*.npy``).

Their names tell the number of samples, the sequence and the seed, and not of which data and which split they are:
after the data were made anew, or the split was changed, upstream trains on other tokens than it should, or stops.
"""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path

from tridock.contracts.run_folder import write_atomic

MARK = "_indexmap.sha256"
"""After the data's prefix: the file that says what the maps beside it are of."""


def drop_stale(prefix: Path, split: str) -> int:
    """Removes the maps of other data or another split; how many. To be called once a node, before anyone makes one.

    What the maps are of stands in ``<data>_indexmap.sha256``. In a folder that cannot be written they stay: whoever
    made them there answers for them.
    """
    mark = prefix.with_name(f"{prefix.name}{MARK}")
    with prefix.with_name(f"{prefix.name}.idx").open("rb") as index:
        digest = hashlib.file_digest(index, "sha256")
    digest.update(split.encode())
    wanted = f"{digest.hexdigest()}\n"
    if mark.is_file() and mark.read_text() == wanted:
        return 0
    maps = list(prefix.parent.glob(f"{glob.escape(prefix.name)}_*_indexmap_*.npy"))
    try:
        for path in maps:
            path.unlink(missing_ok=True)
        write_atomic(mark, wanted.encode())
    except OSError:
        return 0
    return len(maps)
