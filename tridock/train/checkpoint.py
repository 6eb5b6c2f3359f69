"""Checkpoints: written beside, renamed when whole, and pointed to by ``latest`` last.

``checkpoints/iter_0000100/`` holds what the strategy writes and ``tridock.json``; ``checkpoints/latest`` the newest
folder's name, as DeepSpeed's own tools expect it, or ``latest_checkpointed_iteration.txt`` its number, as Megatron's
do. Random states need no place in it: dropout of an iteration is seeded by (seed, rank, iteration), and the order of
the data is a function of the number of consumed samples.

Nodes may or may not share the run's folder. Ranks find out by looking for each other's files; the lowest rank on each
file system, its leader, makes and renames folders there and writes what is common to all ranks. So a checkpoint is
whole on one shared folder, and on nodes that share nothing each holds what its own ranks need to go on.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from tridock.errors import Problem, RequestError, RunError
from tridock.experiment.schema import Experiment
from tridock.run_folder import CHECKPOINTS, write_atomic
from tridock.train.process_group import Consequence, Ranks, barrier, together
from tridock.train.strategies import Strategy

LATEST = "latest"
LATEST_OF_MEGATRON = "latest_checkpointed_iteration.txt"
_PROGRESS = "tridock.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come, and what a checkpoint of it fits."""

    iteration: int
    consumed_samples: int
    strategy: str
    zero_stage: int
    precision: str
    data_parallel_size: int
    model: dict[str, int]
    engine: str = "torch"
    use_distributed_optimizer: bool = False

    @classmethod
    def of(cls, experiment: Experiment, ranks: Ranks, padded_vocab_size: int) -> Progress:
        """The beginning of an experiment."""
        model = experiment.model
        return cls(
            iteration=0,
            consumed_samples=0,
            strategy=experiment.parallel.strategy,
            zero_stage=experiment.parallel.zero_stage if experiment.parallel.strategy == "zero" else 0,
            precision=experiment.precision,
            data_parallel_size=ranks.world_size,
            model={
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "num_attention_heads": model.num_attention_heads,
                "max_position_embeddings": model.max_position_embeddings or model.seq_length,
                "padded_vocab_size": padded_vocab_size,
            },
            engine=experiment.engine,
            use_distributed_optimizer=experiment.parallel.use_distributed_optimizer,
        )


class Checkpoints:
    """The checkpoints of one run. Creating it is a collective."""

    def __init__(self, run_folder: Path, ranks: Ranks, pointer: str = LATEST) -> None:
        self.folder, self.pointer = run_folder / CHECKPOINTS, pointer
        self.ranks = ranks
        self.leader = _leader(self.folder, ranks)
        self.leads = self.leader == ranks.rank

    def require_shared(self) -> None:
        """Refuses a folder that is not one for all ranks. A collective."""
        with together(self.ranks):
            check_shared(self.folder, self.leader)

    def save(self, strategy: Strategy, progress: Progress) -> Path:
        """Writes a checkpoint and points ``latest`` at it; gives its folder. A collective."""
        name = folder_name(progress.iteration)
        final, partial = self.folder / name, self.folder / f".{name}.part"
        try:
            if self.leads:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            barrier()
            strategy.save(partial, writes_shared=self.leads)
            if self.leads:
                write_atomic(partial / _PROGRESS, (json.dumps(asdict(progress), indent=2) + "\n").encode())
            barrier()
            if self.leads:
                _flush(partial)
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                write_atomic(self.folder / self.pointer, pointed(self.pointer, progress.iteration).encode())
            barrier()
        except BaseException as error:
            if isinstance(error, Exception) and not partial.exists() and not final.exists():
                # A rank that failed has removed it under the hands of this one.
                todo = "look for its message in logs/rank-<N>.log"
                raise Consequence(Problem(str(final), "another rank gave the checkpoint up", "", todo)) from error
            # Half a checkpoint is of no use, and may be what fills the disk.
            shutil.rmtree(partial, ignore_errors=True)
            if (got := _write_failure(error)) is None:
                raise
            todo = "free space there or mend its permissions; continue from the last whole checkpoint with train.load"
            what = "the checkpoint could not be written"
            raise RunError(Problem(str(final), what, got, todo)) from error
        return final

    def load(self, strategy: Strategy, source: Path, fresh: Progress) -> Progress:
        """Continues ``strategy`` from a checkpoint folder, or from the latest of a folder of them. A collective.

        ``fresh`` is the beginning of this experiment; what does not fit it is refused before anything is loaded.
        """
        with together(self.ranks):
            folder = find_checkpoint(source, self.pointer)
        folder = common_to_all(folder, self.ranks)
        with together(self.ranks):
            progress = read_progress(folder)
            check_fit(folder, progress, fresh)
            missing = [name for name in strategy.files(self.ranks.rank) if not (folder / name).is_file()]
            if missing:
                todo = "copy the checkpoint's files to this node, or use a checkpoint that is whole"
                raise RequestError(Problem(str(folder), "lacks a file of this rank", missing[0], todo))
        strategy.load(folder)
        return progress


def check_shared(folder: Path, leader: int) -> None:
    """Whether this rank sees what rank 0 writes, by the leader that it found there."""
    if leader != 0:
        what = "checkpoints of this engine lie in one folder that all nodes share"
        got = f"a folder of rank {leader}'s node alone: {folder}"
        raise RequestError(Problem("train.save", what, got, "mount a shared file system there, or set it to false"))


def folder_name(iteration: int) -> str:
    """The folder of one checkpoint."""
    return f"iter_{iteration:07d}"


def pointed(pointer: str, iteration: int) -> str:
    """What the pointer's file says of the newest checkpoint."""
    return str(iteration) if pointer == LATEST_OF_MEGATRON else folder_name(iteration)


def find_checkpoint(source: Path, pointer: str = LATEST) -> Path:
    """The folder of one checkpoint: ``source`` itself, or the one that its pointer names."""
    if (source / _PROGRESS).is_file():
        return source
    try:
        word = (source / pointer).read_text().strip()
        return source / (folder_name(int(word)) if pointer == LATEST_OF_MEGATRON else word)
    except (OSError, ValueError) as error:
        todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
        got = "no such folder" if not source.is_dir() else f"no file named {pointer} in it"
        if isinstance(error, ValueError):
            got = f"{word!r} in {pointer}"
        raise RequestError(Problem("train.load", f"no checkpoint lies at {source}", got, todo)) from None


def common_to_all(folder: Path, ranks: Ranks) -> Path:
    """The checkpoint that all ranks have: nodes that share no folder may have been killed while it was renamed on each.

    A collective.
    """
    names = [""] * ranks.world_size
    dist.all_gather_object(names, folder.name)
    oldest = min(names)
    return folder.with_name(oldest) if oldest.startswith("iter_") else folder


def read_progress(folder: Path) -> Progress:
    """Reads how far a checkpoint had come."""
    try:
        return Progress(**json.loads((folder / _PROGRESS).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = "use another checkpoint: this one is not whole"
        raise RequestError(Problem(str(folder / _PROGRESS), "cannot be read", got, todo)) from None


def check_fit(folder: Path, saved: Progress, wanted: Progress) -> None:
    """Refuses a checkpoint of another model or layout, with every difference."""
    pairs = [(f"model.{name}", saved.model.get(name), value) for name, value in wanted.model.items()]
    pairs.append(("engine", saved.engine, wanted.engine))
    pairs.append(("parallel.strategy", saved.strategy, wanted.strategy))
    if wanted.engine == "megatron-core":
        # What lies where is no matter to its checkpoints; what the optimizer holds is.
        pairs.append(("precision", saved.precision, wanted.precision))
        field = "use_distributed_optimizer"
        pairs.append((f"parallel.{field}", saved.use_distributed_optimizer, wanted.use_distributed_optimizer))
    if wanted.strategy == "zero":
        # DeepSpeed stores the optimizer cut into one piece a rank, in the layout of the stage and precision.
        pairs.append(("parallel.zero_stage", saved.zero_stage, wanted.zero_stage))
        pairs.append(("precision", saved.precision, wanted.precision))
        pairs.append(("data parallel size", saved.data_parallel_size, wanted.data_parallel_size))
    problems = [
        Problem(name, f"the checkpoint {folder} was saved with {there}", str(here), "use the same, or start anew")
        for name, there, here in pairs
        if there != here
    ]
    if problems:
        raise RequestError(problems)


def _leader(folder: Path, ranks: Ranks) -> int:
    """The lowest rank that sees the same files in ``folder`` as this one."""
    folder.mkdir(parents=True, exist_ok=True)
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0)
    local_ranks: list[int] = [0] * ranks.world_size
    dist.all_gather_object(local_ranks, ranks.local_rank)
    candidates = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == min(local_ranks)]
    mine = folder / f".{token[0]}-{ranks.rank}"
    if ranks.rank in candidates:
        mine.touch()
    barrier()
    # Asked for by name: a listing could come out of a network file system's cache.
    leader = next((rank for rank in candidates if (folder / f".{token[0]}-{rank}").exists()), ranks.rank)
    barrier()
    mine.unlink(missing_ok=True)
    return leader


def _write_failure(error: BaseException) -> str | None:
    """What the system said of a failed write; None for an error of another kind, as of a collective."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # torch's own writer turns a full disk into this, and drops the reason.
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
        return "a file cut short (is the disk full?)"
    return None


def _flush(folder: Path) -> None:
    """Brings the folder's files to the disk, before the rename that makes them count."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
