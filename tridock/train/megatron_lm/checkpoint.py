"""Megatron-LM v1.1.5's checkpoints, saved and chosen like those of the other engines; upstream's code writes and reads.

They are in ``global_step<n>/`` with DeepSpeed and in ``iter_<n>/`` without, each with ``files.json`` and the tracker
file that upstream reads. Beside them are upstream's ``latest`` and ``latest_checkpointed_iteration.txt``.
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tridock.contracts.checkpoint_files import Illness
from tridock.contracts.checkpoints import LAYOUT, MANIFEST, TRACKER
from tridock.contracts.run_folder import CHECKPOINTS
from tridock.experiment.schema import Train
from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.checkpoints.choice import choose, holds_checkpoint
from tridock.train.checkpoints.files import DEEPSPEED, MEGATRON
from tridock.train.checkpoints.pickles import megatron_classes, safe_torch_load
from tridock.train.checkpoints.saver import needs_group
from tridock.train.checkpoints.snapshot import Write, write_by_torch_save
from tridock.train.checkpoints.write_errors import replaced
from tridock.train.rank.process_group import Ranks, any_rank

Check = Callable[[Path], None]


class UpstreamCheckpoints:
    """Wraps upstream's ``save_checkpoint`` and ``load_checkpoint``. Every method is a collective."""

    def __init__(self, args: Any, run_folder: Path, ranks: Ranks, train: Train) -> None:
        self._args, self._run_folder, self._ranks, self._keep = args, run_folder, ranks, train.keep_checkpoints
        self._upstream: Any = importlib.import_module("megatron.checkpointing")
        folder = Path(args.save) if args.save else run_folder / CHECKPOINTS
        self._names = DEEPSPEED if args.deepspeed else MEGATRON
        self.checkpoints = Checkpoints(folder, ranks, self._names, needs_group(train))
        self.loaded: Path | None = None

    def start(
        self,
        save: Callable[..., None],
        layout: bytes,
        ill: Illness | None,
        in_background: bool,
        iteration: int,
        model: Any,
        *rest: Any,
    ) -> Callable[[], Path]:
        """Begins a checkpoint with a ``layout.json``; returns what writes it, as :meth:`Checkpoints.start`."""

        def prepare(folder: Path, leaders: Sequence[int], background: object) -> Write:
            places = [(model, "_copy_recovery_script")] if self._args.deepspeed else []
            save_here = partial(save_in, folder, self._writes_weights(leaders))
            return write_by_torch_save(save_here, *places, from_copy=background is not None)

        def save_in(folder: Path, writes_weights: bool) -> None:
            with ExitStack() as changes:
                for owner, name, value in self._writer(model, writes_weights):
                    changes.enter_context(replaced(owner, name, value))
                changes.enter_context(replaced(self._args, "save", str(folder.parent)))
                # Tridock writes the pointer once the checkpoint is complete.
                changes.enter_context(replaced(self._upstream, "get_checkpoint_tracker_filename", lambda _: os.devnull))
                if self._args.deepspeed:
                    tagged = partial(model.save_checkpoint, tag=folder.name, save_latest=False)
                    changes.enter_context(replaced(model, "save_checkpoint", tagged))
                save(iteration, model, *rest)

        own = {TRACKER: str(iteration).encode(), LAYOUT: layout}
        return self.checkpoints.start(prepare, iteration, own, (), self._keep, ill, in_background)

    def _writes_weights(self, leaders: Sequence[int]) -> bool:
        """Whether this rank is the first on its file system of those that have the same weights."""
        rank = dist.get_rank()
        same = dist.get_process_group_ranks(self._upstream.mpu.get_data_parallel_group())
        return rank == min(other for other in same if leaders[other] == leaders[rank])

    def _writer(self, model: Any, writes: bool) -> Iterator[tuple[Any, str, Any]]:
        """Yields what makes a rank write its weights, or not: upstream's and DeepSpeed's first replica alone does."""
        if not self._args.deepspeed:
            yield self._upstream.mpu, "get_data_parallel_rank", lambda: int(not writes)
            return
        yield model, "save_non_zero_checkpoint", writes or model.zero_optimization_partition_weights()
        if self._args.pipe_parallel_size > 0:
            yield model.module._grid, "data_parallel_id", int(not writes)

    def _needed(self, model: Any, folder: Path, names: Collection[str]) -> Iterator[Collection[str]]:
        """Yields the names of the files of a checkpoint that this rank reads."""
        if not self._args.deepspeed:
            part = Path(self._upstream.get_checkpoint_name(str(folder.parent), self._names.iteration(folder.name)))
            yield [TRACKER, LAYOUT, part.relative_to(folder).as_posix()]
            return
        where = str(folder.parent), folder.name
        # DeepSpeed counts the files of all model parallel ranks.
        found = [TRACKER, LAYOUT, Path(model._get_ckpt_name(*where)).name]
        found += [it for it in names if it.startswith("mp_rank_")]
        if model.zero_optimization():
            found.append(Path(model._get_zero_ckpt_name(*where)).name)
        if self._args.pipe_parallel_size > 0:
            layers = range(len(model.module.forward_funcs))
            # DeepSpeed takes a layer's files as many slices of tensor parallelism as it finds.
            starts = tuple(f"layer_{layer + model.module._local_start:02d}-" for layer in layers)
            found += [name for name in names if name.startswith(starts)]
        yield found

    def begins(self) -> bool:
        """Whether the run loads from the folder in which it saves, and that has no checkpoint yet."""
        source = Path(self._args.load)
        return self._args.load == self._args.save and not holds_checkpoint(source, self._names, self._ranks)

    def load(self, load: Callable[..., int], check: Check, model: Any, *rest: Any, **named: Any) -> int:
        """Loads the newest complete checkpoint, or the one that upstream chooses if none has a ``files.json``.

        Returns its iteration. ``check`` is called with the folder of the former."""
        source = Path(self._args.load)
        places = (source, *(source / self._names.folder(number) for number in self._names.found(source)))
        with ExitStack() as changes:
            changes.enter_context(safe_torch_load(megatron_classes()))
            if not any_rank(self._ranks, any((place / MANIFEST).is_file() for place in places)):
                iteration = load(model, *rest, **named)
                self.loaded = source / self._names.folder(iteration)
                return iteration
            needed = partial(self._needed, model)
            folder = self.loaded = choose(source, self._names, self._ranks, needed, self._run_folder)
            check(folder)
            changes.enter_context(replaced(self._args, "load", str(folder.parent)))
            tracker = str(folder / TRACKER)
            changes.enter_context(replaced(self._upstream, "get_checkpoint_tracker_filename", lambda _: tracker))
            if self._args.deepspeed:
                tagged = partial(model.load_checkpoint, tag=folder.name)
                changes.enter_context(replaced(model, "load_checkpoint", tagged))
            return load(model, *rest, **named)
