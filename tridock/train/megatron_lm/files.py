"""The files of a run of Megatron-LM v1.1.5: which there must be, and index maps of other data."""

import hashlib
import itertools
from pathlib import Path

from tridock.contracts.checkpoints import MANIFEST, TRACKER
from tridock.contracts.run_folder import write_atomic
from tridock.data.dataset.index_maps import foreign_maps, index_maps
from tridock.errors import Problem, RequestError

MARK = "_indexmap.sha256"
"""Suffix, after the data's prefix, of the file that identifies the data of the index maps beside it."""


def remove_stale(prefix: Path, split: str) -> int:
    """Removes maps of other data or another split; returns their number. Call it once per node, before building maps.

    ``<data>_indexmap.sha256`` identifies the data of the maps. Maps in a read-only folder stay.
    """
    mark = prefix.with_name(f"{prefix.name}{MARK}")
    with prefix.with_name(f"{prefix.name}.idx").open("rb") as index:
        digest = hashlib.file_digest(index, "sha256")
    digest.update(split.encode())
    wanted = f"{digest.hexdigest()}\n"
    if mark.is_file() and mark.read_text() == wanted:
        return 0
    maps = index_maps(prefix)
    try:
        for path in maps:
            path.unlink(missing_ok=True)
        write_atomic(mark, wanted.encode())
    except OSError:
        return 0
    return len(maps)


def check_files(argv: list[str]) -> None:
    """Raises :class:`RequestError` with every file of the command line that does not exist, or is no index map.

    Upstream would end with a traceback, or, without a checkpoint, start from random weights.
    """
    given = dict(itertools.pairwise(argv))
    named = {
        "data.data_path": [f"{given['--data-path']}.bin", f"{given['--data-path']}.idx"],
        "data.vocab_file": [given["--vocab-file"]],
        "data.merge_file": [given["--merge-file"]],
    }
    todo = "copy the data here: tridock data sync, or make it: tridock data preprocess"
    problems = [
        Problem(field, "no such file", path, todo)
        for field, paths in named.items()
        for path in paths
        if not Path(path).is_file()
    ]
    problems += foreign_maps(Path(given["--data-path"]))
    RequestError.raise_for(problems)


def loads(argv: list[str]) -> bool:
    """Whether this node has what the command line loads, if it does. A folder to save in may be empty."""
    given = dict(itertools.pairwise(argv))
    if "--load" not in given or given["--load"] == given.get("--save"):
        return True
    load = Path(given["--load"])
    # The tracker file may be missing, or name a checkpoint that is.
    return (load / TRACKER).is_file() or any(load.glob(f"*/{MANIFEST}"))


def no_checkpoint(argv: list[str]) -> RequestError:
    """The error of a command line whose checkpoint no node has."""
    load = dict(itertools.pairwise(argv))["--load"]
    what, todo = "holds no checkpoint of Megatron-LM v1.1.5", "give the checkpoints folder of a run of this engine"
    return RequestError(Problem("train.load", what, load, todo))
