"""The weights of a checkpoint of Megatron-LM's legacy models, whatever its strategy and parallel sizes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.megatron_weights import (
    MegatronFiles,
    holds_checkpoint,
    joined_stages,
    megatron_files,
    name_in_pipeline,
)
from tridock.contracts.pretrained import MEGATRON_TODO
from tridock.errors import Problem, RequestError
from tridock.experiment.megatron_weights import half, megatron_name, split_dimension
from tridock.experiment.model import Model
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights, other_dtypes
from tridock.train.checkpoints.pickles import is_zip, megatron_classes, refusing_foreign, safe_torch_load


class MegatronWeights:
    """Whole weights by engine torch's names: the parts of all tensor parallel ranks, joined.

    Raises :class:`RequestError` if a file is damaged, or holds an object that is not safe to load.
    """

    def __init__(self, folder: Path, model: Model, files: MegatronFiles | None = None) -> None:
        self.folder, self._model = folder, model
        files = files or megatron_files(folder)
        self.arguments: Mapping[str, Any] | None = None
        self.version: float = 2.0
        """Of the order of queries, keys and values. DeepSpeed's checkpoints may have none: v1.1.5 writes this one."""
        if files.plain:
            self._ranks = [self._plain(own) for own in files.plain]
        elif files.layers:
            self._ranks = [_pipeline(own) for own in files.layers]
        else:
            own = [DeepSpeedWeights(folder, states, megatron_classes()) for states in files.states]
            self._take_settings(own[0].client_state)
            self._ranks = [_Shard(it.shapes, it.read, it.other_dtypes) for it in own]
        if self.version not in (0, 1.0, 2.0, 3.0):
            todo = "convert it with the Megatron-LM that wrote it, to a transformers folder, and use train.load: hf:DIR"
            what = "has a checkpoint_version that no known Megatron-LM writes"
            raise RequestError(Problem(str(folder), what, str(self.version), todo))

    @property
    def parts(self) -> list[Mapping[str, tuple[int, ...]]]:
        """Each tensor parallel rank's shapes, by v1.1.5's names."""
        return [rank.shapes for rank in self._ranks]

    @property
    def other_dtypes(self) -> Mapping[str, str]:
        """Types that are not read (:class:`tridock.contracts.pretrained.StoredWeights`)."""
        return {name: dtype for rank in self._ranks for name, dtype in rank.other_dtypes.items()}

    def read(self, name: str) -> Tensor:
        """Returns a weight by its name in engine torch; tables have v1.1.5's padding."""
        parts = [rank.read(megatron_name(name)) for rank in self._ranks]
        if ".query_key_value." in name:
            parts = [self._by_heads(part) for part in parts]
        if (number := half(self._model, name)) is not None:
            parts = [part.chunk(2)[number] for part in parts]
        split = split_dimension(name)
        return parts[0] if split is None or len(parts) == 1 else torch.cat(parts, split)

    def _by_heads(self, part: Tensor) -> Tensor:
        """Returns queries, keys and values head by head, as since version 2 and in engine torch."""
        size = self._model.head_size
        if self.version == 0:  # all queries, all keys, all values
            return part.unflatten(0, (3, -1, size)).transpose(0, 1).flatten(0, 2)
        if self.version == 1.0:  # of each element of a head the query, the key and the value
            return part.unflatten(0, (-1, size, 3)).transpose(1, 2).flatten(0, 2)
        return part

    def _plain(self, files: Sequence[Path]) -> "_Shard":
        states = [_load(file) for file in files]
        self._take_settings({"checkpoint_version": 0, **states[0]})
        return _Shard.of(joined_stages(states))

    def _take_settings(self, state: Mapping[str, Any]) -> None:
        self.version = state.get("checkpoint_version", self.version)
        if "args" in state:
            self.arguments = vars(state["args"])


class _Shard:
    """One tensor parallel rank's weights, by v1.1.5's names."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor], other_dtypes: Mapping[str, str]
    ) -> None:
        self.shapes, self.read, self.other_dtypes = shapes, read, other_dtypes

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "_Shard":
        """``found``: what a file holds by these names, which are tensors or refused."""
        tensors = {name: it if isinstance(it, Tensor) else torch.empty(()) for name, it in found.items()}
        shapes = {name: tuple(it.shape) for name, it in tensors.items()}
        return cls(shapes, tensors.__getitem__, other_dtypes({name: it.dtype for name, it in tensors.items()}))


def megatron_lm_weights(folder: Path, model: Model) -> Callable[[str], Tensor] | None:
    """Returns a function that reads a weight by its name in engine torch; None for another program's checkpoint."""
    if not holds_checkpoint(folder):
        return None
    files = megatron_files(folder)
    if files.states and not _is_megatrons(files.states[0].models[0]):
        return None
    return MegatronWeights(folder, model, files).read


def _is_megatrons(file: Path) -> bool:
    state = _load(file)
    names = [name for group in state.get("param_shapes") or () for name in group]
    return "language_model" in (state.get("module") or ()) or any(it.startswith("language_model.") for it in names)


def _pipeline(layers: Mapping[int, Path]) -> _Shard:
    """Opens a pipeline's file per layer."""
    last, states = max(layers), {number: _load(file) for number, file in layers.items()}
    return _Shard.of(
        {name_in_pipeline(at, last, name): it for at, state in states.items() for name, it in state.items()}
    )


def _load(file: Path) -> Any:
    refuse_pointer(file)
    with safe_torch_load(megatron_classes(), mmap=is_zip(file)), refusing_foreign(MEGATRON_TODO):
        return torch.load(file, map_location="cpu", weights_only=True)
