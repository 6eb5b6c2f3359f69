"""A rank: ``python -m tridock.train.megatron_lm.pretrain_gpt2 --run-folder <folder> <Megatron's arguments>``.

Runs DeepSpeedExamples' Megatron-LM v1.1.5, with the patches of ``patches/megatron-v1.1.5``, from the image's folder or
from the folder in TRIDOCK_MEGATRON.
"""

import argparse
import itertools
import os
import runpy
import sys
from pathlib import Path

from tridock.contracts import environment
from tridock.contracts.checkpoints import MANIFEST, TRACKER
from tridock.contracts.run_folder import EXPERIMENT, MEGATRON
from tridock.errors import Problem, RequestError, RunError
from tridock.train.megatron_lm import index_maps
from tridock.train.rank.run import end, form_world, record_end, run_rank


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tridock.train.megatron_lm.pretrain_gpt2",
        description="One rank of engine megatron-deepspeed; what it does not know is Megatron's.",
        allow_abbrev=False,
    )
    parser.add_argument("--run-folder", type=Path, required=True, help="runs/<run-id>, with experiment.yaml in it")
    options, argv = parser.parse_known_args()
    run_folder: Path = options.run_folder.absolute()
    return run_rank(run_folder, lambda: _train(run_folder, argv))


def source_folder() -> Path:
    """Returns Megatron's folder. Raises :class:`RequestError` if it is missing."""
    folder = Path(os.environ.get(environment.MEGATRON) or MEGATRON)
    if not (folder / "pretrain_gpt2.py").is_file():
        todo = "build the image with its source (tridock image --megatron WHERE), or name its folder in "
        todo += environment.MEGATRON
        raise RequestError(Problem("engine", "Megatron-LM v1.1.5 is not installed", str(folder), todo))
    return folder


def _train(run_folder: Path, argv: list[str]) -> None:
    from tridock.experiment import load_experiment
    from tridock.train.rank import process_group
    from tridock.train.rank.device import set_tf32

    ranks = form_world(run_folder)
    with process_group.agree_on_errors(ranks):
        experiment = load_experiment(run_folder / EXPERIMENT)
        source = source_folder()
        check_files(argv)
        stale = remove_stale_maps(argv) if ranks.local_rank == 0 else 0
    process_group.barrier()
    set_tf32(experiment.train.tf32)

    from tridock import compat
    from tridock.compat import megatron_v115
    from tridock.train.megatron_lm.record import Recorder
    from tridock.train.parallel.strategies import import_deepspeed

    # Joins before Megatron's own initialization, which then uses this process group.
    import_deepspeed(ranks)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks.world_size)
    replaced = compat.install(ranks.device.type, local_ranks)
    sys.path.insert(0, str(source))
    replaced += megatron_v115.adapt(ranks.device.type)
    if ranks.rank == 0:
        print("".join(f"compat: {line}\n" for line in replaced), end="", flush=True)
    if stale:
        print(f"removed {stale} index maps beside the data: they were of other data or another split", flush=True)

    from megatron import training

    recorder = Recorder(training, experiment, run_folder, ranks)
    sys.argv = [str(source / "pretrain_gpt2.py"), *argv]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:  # from Megatron when it gives up, or from argparse
        if left.code not in (0, None):
            what, todo = "Megatron exited", "see the lines above; megatron_args of the experiment may be wrong"
            raise RunError(Problem("megatron", what, f"exit code {left.code}", todo)) from None
    recorder.metrics.close()
    record_end(run_folder, ranks, recorder.iteration)


def check_files(argv: list[str]) -> None:
    """Raises :class:`RequestError` with every file of the command line that does not exist.

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
    load = Path(given.get("--load", ""))
    # The tracker file may be missing, or name a checkpoint that is. A folder to save in may be empty.
    is_own = given.get("--load") == given.get("--save")
    if "--load" in given and not is_own and not (load / TRACKER).is_file() and not any(load.glob(f"*/{MANIFEST}")):
        what, todo = "holds no checkpoint of Megatron-LM v1.1.5", "give the checkpoints folder of a run of this engine"
        problems.append(Problem("train.load", what, given["--load"], todo))
    if problems:
        raise RequestError(problems)


def remove_stale_maps(argv: list[str]) -> int:
    """Removes the index maps beside the data that belong to other data or another split; returns their number."""
    given = dict(itertools.pairwise(argv))
    return index_maps.remove_stale(Path(given["--data-path"]), given["--split"])


if __name__ == "__main__":
    end(main())
