"""A rank: ``python -m tridock.train.megatron_lm.pretrain_gpt2 --run-folder <folder> <Megatron's arguments>``.

Runs DeepSpeedExamples' Megatron-LM v1.1.5, with the patches of ``patches/megatron-v1.1.5``, from the image's folder or
from the folder in TRIDOCK_MEGATRON.
"""

import argparse
import itertools
from pathlib import Path

from tridock.contracts.prerequisites import megatron_source
from tridock.contracts.run_folder import EXPERIMENT
from tridock.train.megatron_lm.files import check_files, loads, no_checkpoint, remove_stale
from tridock.train.megatron_lm.upstream import prepare, run
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


def _train(run_folder: Path, argv: list[str]) -> None:
    from tridock.experiment import load_experiment
    from tridock.train.rank import process_group
    from tridock.train.rank.device import set_tf32

    ranks = form_world(run_folder)
    with process_group.agree_on_errors(ranks):
        experiment = load_experiment(run_folder / EXPERIMENT)
        source = megatron_source()
        check_files(argv)
        given = dict(itertools.pairwise(argv))
        stale = remove_stale(Path(given["--data-path"]), given["--split"]) if ranks.local_rank == 0 else 0
    if not process_group.any_rank(ranks, loads(argv)):
        raise process_group.AgreedError(no_checkpoint(argv))
    set_tf32(experiment.train.tf32)

    from tridock.train.megatron_lm.record import Recorder

    prepare(ranks, source)
    if stale:
        print(f"removed {stale} index maps beside the data: they were of other data or another split", flush=True)

    from megatron import training

    recorder = Recorder(training, experiment, run_folder, ranks)
    run(source, argv, "megatron", "see the lines above; megatron_args of the experiment may be wrong")
    recorder.metrics.close()
    record_end(run_folder, ranks, recorder.iteration)


if __name__ == "__main__":
    end(main())
