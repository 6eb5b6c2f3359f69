"""``python -m tridock.train.megatron_lm.index_maps --data-parallel-size N <Megatron's arguments>``.

Builds the sample index maps that the run's ranks would build, with upstream's code, on the CPU, without a model. Prints
:class:`tridock.contracts.node_answers.IndexMaps` as JSON. Keeps existing maps.
"""

import argparse
import contextlib
import glob
import hashlib
import itertools
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tridock.contracts.codec import encode
from tridock.contracts.events import Cause
from tridock.contracts.node_answers import IndexMaps
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RunError, TridockError

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
    maps = list(prefix.parent.glob(f"{glob.escape(prefix.name)}_*_indexmap_*.npy"))
    try:
        for path in maps:
            path.unlink(missing_ok=True)
        write_atomic(mark, wanted.encode())
    except OSError:
        return 0
    return len(maps)


_PARTS: Final = ("doc_idx", "sample_idx", "shuffle_idx")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tridock.train.megatron_lm.index_maps", allow_abbrev=False)
    parser.add_argument("--data-parallel-size", type=int, required=True, help="replicas that the run will have")
    options, argv = parser.parse_known_args()
    # Set before torch is imported: a run may use the GPUs.
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = make(argv, options.data_parallel_size)
    except TridockError as error:
        print(error, file=sys.stderr)
        print(encode(IndexMaps(problems=error.problems)))
        return error.exit_code
    print(encode(answer))
    return 0


def make(argv: list[str], data_parallel_size: int) -> IndexMaps:
    """Builds the maps of a run with this ``argv``, beside its data; returns their names."""
    from tridock.train.megatron_lm.pretrain_gpt2 import check_files, remove_stale_maps, source_folder

    source = source_folder()
    check_files(argv)
    prefix = Path(dict(itertools.pairwise(argv))["--data-path"])
    remove_stale_maps(argv)
    try:
        # Upstream writes to the final names, so after an interruption the next run would use a truncated map.
        with tempfile.TemporaryDirectory(prefix=f".{prefix.name}_indexmap.", dir=prefix.parent) as folder:
            aside = Path(folder) / prefix.name
            _link(prefix, Path(folder))
            place = argv.index("--data-path") + 1
            files = _upstream([*argv[:place], str(aside), *argv[place + 1 :]], source, data_parallel_size)
            made = [name for name in files if not (Path(folder) / name).is_symlink()]
            for name in made:
                (Path(folder) / name).replace(prefix.parent / name)
    except OSError as error:
        todo = "make the folder writable for the node's user, and free space on its disk"
        got, cause = f"{error.strerror} in {prefix.parent}", Cause.INDEX_MAPS_NOT_WRITABLE
        problem = Problem("index maps", "cannot be made beside the data", got, todo, cause=cause)
        raise RunError(problem) from None
    return IndexMaps(len(made), (*files, f"{prefix.name}{MARK}"))


def _link(prefix: Path, folder: Path) -> None:
    """Links the data and the complete index maps. Upstream would rebuild all parts of an incomplete map, through the
    links."""
    names = [f"{prefix.name}.bin", f"{prefix.name}.idx"]
    for first in prefix.parent.glob(f"*_{_PARTS[0]}.npy"):
        parts = [f"{first.name.removesuffix(f'{_PARTS[0]}.npy')}{part}.npy" for part in _PARTS]
        if first.name.startswith(f"{prefix.name}_") and all((prefix.parent / part).is_file() for part in parts):
            names += parts
    for name in names:
        (folder / name).symlink_to((prefix.parent / name).absolute())


def _upstream(argv: list[str], source: Path, data_parallel_size: int) -> list[str]:
    """Runs ``pretrain_gpt2.py`` until it has built its data sets; returns the names of the maps that they opened."""
    from tridock import compat
    from tridock.compat import megatron_v115
    from tridock.train.parallel.strategies import import_deepspeed
    from tridock.train.rank import process_group

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    ranks = process_group.join()
    import_deepspeed(ranks)
    compat.install(ranks.device.type, 1)
    sys.path.insert(0, str(source))
    megatron_v115.adapt(ranks.device.type)

    from megatron import mpu, training

    datasets: list[Any] = []

    def only_data(provider: Any, _model: Any, _step: Any, **initial: Any) -> None:
        training.initialize_megatron(**initial)
        mpu.get_data_parallel_world_size = lambda: data_parallel_size
        training.make_data_loader = datasets.append  # returns None, so upstream makes no loader
        training.build_train_valid_test_data_iterators(provider)

    training.pretrain = only_data
    sys.argv = [str(source / "pretrain_gpt2.py"), *argv]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:  # argparse, where megatron_args of the experiment are wrong
        todo = "see megatron_args of the experiment"
        raise RunError(Problem("index maps", "Megatron exited", f"exit code {left.code}", todo)) from None
    finally:
        process_group.leave()
    opened = (getattr(dataset, part) for dataset in datasets if dataset is not None for part in _PARTS)
    return [Path(array.filename).name for array in opened]


if __name__ == "__main__":
    sys.exit(main())
