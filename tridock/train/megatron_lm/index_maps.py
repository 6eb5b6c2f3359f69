"""``python -m tridock.train.megatron_lm.index_maps --data-parallel-size N <Megatron's arguments>``.

Builds the sample index maps that the run's ranks would build, with upstream's code, on the CPU, without a model. Prints
:class:`tridock.contracts.node_answers.IndexMaps` as JSON. Keeps existing maps.
"""

import argparse
import contextlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any, Final

from tridock.contracts.codec import encode
from tridock.contracts.events import Cause
from tridock.contracts.node_answers import IndexMaps
from tridock.contracts.partials import partial_folder
from tridock.contracts.prerequisites import megatron_source
from tridock.errors import Problem, RunError, TridockError
from tridock.train.megatron_lm.files import MARK, check_files, remove_stale
from tridock.train.megatron_lm.upstream import prepare, run

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
    source = megatron_source()
    check_files(argv)
    given = dict(itertools.pairwise(argv))
    prefix = Path(given["--data-path"])
    remove_stale(prefix, given["--split"])
    try:
        # Upstream writes to the final names, so after an interruption the next run would use a truncated map.
        with partial_folder(prefix.with_name(f"{prefix.name}_indexmap")) as folder:
            aside = folder / prefix.name
            _link(prefix, folder)
            place = argv.index("--data-path") + 1
            files = _upstream([*argv[:place], str(aside), *argv[place + 1 :]], source, data_parallel_size)
            made = [name for name in files if not (folder / name).is_symlink()]
            for name in made:
                (folder / name).replace(prefix.parent / name)
    except OSError as error:
        todo = "make the folder writable for the node's user, and free space on its disk"
        got, cause = f"{error.strerror} in {prefix.parent}", Cause.INDEX_MAPS_NOT_WRITABLE
        problem = Problem("index maps", "cannot be made beside the data", got, todo, cause=cause)
        raise RunError(problem) from None
    return IndexMaps(len(made), (*files, f"{prefix.name}{MARK}"))


def _link(prefix: Path, folder: Path) -> None:
    """Links the data and the complete index maps. Upstream would rebuild an incomplete map through the links."""
    names = [f"{prefix.name}.bin", f"{prefix.name}.idx"]
    for first in prefix.parent.glob(f"*_{_PARTS[0]}.npy"):
        parts = [f"{first.name.removesuffix(f'{_PARTS[0]}.npy')}{part}.npy" for part in _PARTS]
        if first.name.startswith(f"{prefix.name}_") and all((prefix.parent / part).is_file() for part in parts):
            names += parts
    for name in names:
        (folder / name).symlink_to((prefix.parent / name).absolute())


def _upstream(argv: list[str], source: Path, data_parallel_size: int) -> list[str]:
    """Runs ``pretrain_gpt2.py`` until it has built its data sets; returns the names of the maps that they opened."""
    from tridock.train.rank import process_group

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    prepare(process_group.join(), source, quiet=True)

    from megatron import mpu, training

    datasets: list[Any] = []

    def only_data(provider: Any, _model: Any, _step: Any, **initial: Any) -> None:
        training.initialize_megatron(**initial)
        mpu.get_data_parallel_world_size = lambda: data_parallel_size
        training.make_data_loader = datasets.append  # returns None, so upstream makes no loader
        training.build_train_valid_test_data_iterators(provider)

    training.pretrain = only_data
    try:
        run(source, argv, "index maps", "see megatron_args of the experiment")
    finally:
        process_group.leave()
    opened = (getattr(dataset, part) for dataset in datasets if dataset is not None for part in _PARTS)
    return [Path(array.filename).name for array in opened]


if __name__ == "__main__":
    sys.exit(main())
