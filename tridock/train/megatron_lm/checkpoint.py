"""Megatron-LM v1.1.5's checkpoints, saved and chosen like those of the other engines; upstream's code writes and reads.

They are in ``global_step<n>/`` with DeepSpeed and in ``iter_<n>/`` without, each with ``files.json`` and the tracker
file that upstream reads. Beside them are upstream's ``latest`` and ``latest_checkpointed_iteration.txt``.
"""

import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tridock.contracts.checkpoints import MANIFEST, TRACKER
from tridock.contracts.run_folder import CHECKPOINTS
from tridock.experiment.schema import Train
from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.checkpoints.choice import Rejected, choose, holds_checkpoint
from tridock.train.checkpoints.files import DEEPSPEED, MEGATRON
from tridock.train.checkpoints.pickles import megatron_classes, safe_torch_load
from tridock.train.checkpoints.saver import saves_in_background
from tridock.train.checkpoints.snapshot import Write, write_by_torch_save
from tridock.train.checkpoints.write_errors import replaced
from tridock.train.rank.process_group import Ranks, any_rank


class UpstreamCheckpoints:
    """Wraps upstream's ``save_checkpoint`` and ``load_checkpoint``. Every method is a collective."""

    def __init__(self, args: Any, run_folder: Path, ranks: Ranks, train: Train) -> None:
        self._args, self._ranks, self._keep = args, ranks, train.keep_checkpoints
        self._upstream: Any = importlib.import_module("megatron.checkpointing")
        folder = Path(args.save) if args.save else run_folder / CHECKPOINTS
        self._names = DEEPSPEED if args.deepspeed else MEGATRON
        self.checkpoints = Checkpoints(folder, ranks, self._names, saves_in_background(train))
        self.loaded: Path | None = None

    def start(
        self, save: Callable[..., None], in_background: bool, iteration: int, model: Any, *rest: Any
    ) -> Callable[[], Path]:
        """Begins a checkpoint; returns the function that writes it, as :meth:`Checkpoints.start`."""

        def prepare(folder: Path, _writes_shared: bool, background: object) -> Write:
            places = [(model, "_copy_recovery_script")] if self._args.deepspeed else []
            return write_by_torch_save(partial(save_in, folder), *places, from_copy=background is not None)

        def save_in(folder: Path) -> None:
            with ExitStack() as changes:
                changes.enter_context(replaced(self._args, "save", str(folder.parent)))
                # Tridock writes the pointer once the checkpoint is complete.
                changes.enter_context(replaced(self._upstream, "get_checkpoint_tracker_filename", lambda _: os.devnull))
                if self._args.deepspeed:
                    tagged = partial(model.save_checkpoint, tag=folder.name, save_latest=False)
                    changes.enter_context(replaced(model, "save_checkpoint", tagged))
                save(iteration, model, *rest)

        own = {TRACKER: str(iteration).encode()}
        return self.checkpoints.start(prepare, iteration, own, (), self._keep, in_background)

    def begins(self) -> bool:
        """Whether the run loads from the folder in which it saves, and that has no checkpoint yet."""
        source = Path(self._args.load)
        return self._args.load == self._args.save and not holds_checkpoint(source, self._names, self._ranks)

    def load(self, load: Callable[..., int], rejected: Rejected, model: Any, *rest: Any, **named: Any) -> int:
        """Loads the newest complete checkpoint, or the one that upstream chooses if none has a ``files.json``.

        Returns its iteration."""
        with safe_torch_load(megatron_classes()):
            return self._load(load, rejected, model, *rest, **named)

    def _load(self, load: Callable[..., int], rejected: Rejected, model: Any, *rest: Any, **named: Any) -> int:
        source = Path(self._args.load)
        if not any_rank(self._ranks, any((*source.glob(MANIFEST), *source.glob(f"*/{MANIFEST}")))):
            iteration = load(model, *rest, **named)
            self.loaded = source / self._names.folder(iteration)
            return iteration
        folder = self.loaded = choose(source, self._names, self._ranks, lambda _: (), rejected)
        with ExitStack() as changes:
            changes.enter_context(replaced(self._args, "load", str(folder.parent)))
            tracker = str(folder / TRACKER)
            changes.enter_context(replaced(self._upstream, "get_checkpoint_tracker_filename", lambda _: tracker))
            if self._args.deepspeed:
                tagged = partial(model.load_checkpoint, tag=folder.name)
                changes.enter_context(replaced(model, "load_checkpoint", tagged))
            return load(model, *rest, **named)
