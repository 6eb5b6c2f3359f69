"""What engine ``megatron-core`` brings to the training loop."""

from __future__ import annotations

from pathlib import Path

from tridock.engines import engine_of
from tridock.experiment.schema import Experiment
from tridock.experiment.sizes import model_parameters
from tridock.train.checkpoints.files import MEGATRON
from tridock.train.checkpoints.progress import Progress
from tridock.train.data.dataset import load_splits
from tridock.train.megatron_core.layout import Layout
from tridock.train.megatron_core.samples import gpt_splits
from tridock.train.megatron_core.strategy import MegatronCore
from tridock.train.models.gpt import Shape
from tridock.train.rank.process_group import Ranks, together
from tridock.train.trainer import Parts, check_batch


def megatron_core_parts(experiment: Experiment, _run_folder: Path, workspace: Path, ranks: Ranks) -> Parts:
    """Forms the groups, reads the data and builds this rank's part of the model."""
    layout = Layout.form(experiment.parallel)
    layout.reseed(experiment.train.seed, 0)
    experiment = experiment.resolved(layout.data_parallel_size)
    with together(ranks):
        check_batch(experiment, layout.data_parallel_size)
        splits = gpt_splits(experiment, workspace, load_splits(experiment, workspace))
    # A checkpoint fits another tensor parallel size, whose padding is another: it goes by the one without.
    shape = Shape.of(experiment.model, splits["train"].vocab_size)
    padded = engine_of(experiment).padded_vocab_size(shape.padded_vocab_size, experiment)
    return Parts(
        splits=splits,
        strategy=MegatronCore(experiment, splits["train"].vocab_size, padded, layout, ranks),
        progress=Progress.of(experiment, ranks, shape.padded_vocab_size),
        parameters=model_parameters(experiment.model, padded),
        words=layout.words,
        replica=layout.data_parallel_rank,
        replicas=layout.data_parallel_size,
        reseed=lambda iteration: layout.reseed(experiment.train.seed, iteration),
        checkpoint_names=MEGATRON,
        shared_checkpoints=True,
    )
