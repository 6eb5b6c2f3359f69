"""The program of an engine: what its ranks execute, what that needs of a node, and the checkpoints it writes. Pure."""

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tridock.contracts import run_folder
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout import Plan


@dataclass(frozen=True, slots=True)
class RankProgram:
    """``python -m module *arguments`` with ``env``, and the files that it reads from the run's folder."""

    module: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Program(ABC):
    """What runs on a rank. An engine must say only how it starts, and on which layouts its checkpoints load."""

    checkpoints_load_on: ClassVar[Literal["any layout", "other replicas", "same layout"]]
    resumes_formats: ClassVar[frozenset[str]] = frozenset()
    """Other programs' formats (``FORMAT`` of ``train.load: FORMAT:DIR``) of checkpoints that a run resumes from."""
    needs_megatron_source: ClassVar[bool] = False
    """Whether every node must have the source of Megatron-LM v1.1.5."""
    checkpoint_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, besides model and strategy, in which a checkpoint must match the experiment to be loaded."""
    tokenizer_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of ``data`` that name the tokenizer files, which every rank reads."""
    whole_samples: ClassVar[bool] = True
    """Whether documents are divided as megatron-core does, and each part of the data must have a whole sample;
    otherwise as Megatron-LM v1.1.5 does."""
    prints_timers: ClassVar[bool] = False
    """Whether the first rank logs the phases of a step, as Megatron-LM's timers do."""
    has_plain_loop: ClassVar[bool] = False
    """Whether ``tridock bench`` can compare it with a plain PyTorch loop."""

    @abstractmethod
    def of_rank(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        """Returns a rank's program; ``env`` adds to every engine's variables. ``load``: checkpoints to resume from."""

    def index_maps(self, experiment: Experiment, plan: Plan, workspace: str) -> tuple[str, ...] | None:
        """Returns module and arguments that build the samples' index maps; None if the ranks build them in memory."""
        return None

    # What a node needs

    def packages(self, experiment: Experiment) -> Mapping[str, str]:
        """Returns optional Python packages that every node's image must have, each with the field that needs it."""
        return {}

    def nvme_folders(self, experiment: Experiment) -> Mapping[str, str]:
        """Returns folders on NVMe that every node must have, each with the field that names it."""
        return {}

    def needs_multicast(self, experiment: Experiment) -> bool:
        """Returns whether every GPU must have CUDA multicast."""
        return False

    # Checkpoints

    def checkpoint_strategy(self, experiment: Experiment) -> str:
        """Returns the strategy of the checkpoints that the experiment loads and writes."""
        return experiment.parallel.strategy

    def checkpoint_problems(
        self, experiment: Experiment, data_parallel_size: int, written: object
    ) -> Iterator[Problem]:
        """Yields the problems of the checkpoint of ``train.load``; ``written``: what it says of itself, if anything."""
        yield from ()


def checkpoints_folder(experiment: Experiment, run_path: str) -> str:
    """Returns the absolute path of the run's checkpoints."""
    workspace = posixpath.dirname(posixpath.dirname(run_path))
    return posixpath.join(workspace, experiment.train.checkpoint_folder or f"{run_path}/{run_folder.CHECKPOINTS}")
