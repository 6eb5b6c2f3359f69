"""Converts weights between the names and layouts of engine torch and those of Hugging Face's transformers.

Engine torch and megatron-core both order a layer's queries, keys and values group by group. megatron-core stores
SwiGLU's two matrices as one, and each norm with the matrix that follows it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tridock.contracts.pretrained import DOWNLOAD, StoredWeights
from tridock.contracts.safetensors_files import transformers_folder
from tridock.errors import Problem, RequestError
from tridock.experiment.families import family_of
from tridock.experiment.inputs import weights_problems
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.experiment.transformers_weights import VOCABULARY, StoredNames, half_of, is_transposed, target_names
from tridock.train.models.gpt import GPT, Shape


class Stored(Protocol):
    """Whole weights by transformers' names, read one by one."""

    folder: Path

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor: ...


class Safetensors:
    """The files of ``save_pretrained``. Raises :class:`RequestError` if one is missing, damaged or not complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found, self._places = transformers_folder(folder)

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def read(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self._places[name].file
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RequestError(Problem(str(file), "cannot be read", str(error), DOWNLOAD)) from None
        return tensor


Read = Callable[[str], Tensor]
"""Returns a whole weight by its name in engine torch's model."""


def names_of(model: Model) -> list[str]:
    """Returns engine torch's names of a model's weights, in the order of the forward pass."""
    return list(weights_on_meta(model, 1))


def weights_on_meta(model: Model, rows: int) -> dict[str, Tensor]:
    """Returns the weights in that order, without data; the token table has ``rows`` rows."""
    with torch.device("meta"):
        weights = dict(GPT(Shape(model, rows)).named_parameters())
    names = sorted(weights, key=lambda name: name.startswith(("final_norm", "output_layer")))
    return {name: weights[name] for name in names}


def exported(model: Model, tokens: int, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight with transformers' name and layout, without the padding of the vocabulary."""
    family = family_of(model)
    for name in names_of(model):
        tensor = read(name)
        targets = target_names(family, name)
        if name in VOCABULARY:
            tensor = tensor[:tokens]
        parts = _split_heads(model, tensor) if ".query_key_value." in name else [tensor]
        if len(targets) < len(parts):
            parts = [torch.cat(parts)]
        for target, part in zip(targets, parts, strict=True):
            yield target, (part.t() if is_transposed(family, name, part.dim()) else part).contiguous()


def _split_heads(model: Model, tensor: Tensor) -> list[Tensor]:
    groups = tensor.unflatten(0, (model.query_groups, -1, model.head_size))
    return [groups[:, part].flatten(0, -tensor.dim()) for part in (slice(-2), slice(-2, -1), slice(-1, None))]


def _join_heads(model: Model, parts: Sequence[Tensor]) -> Tensor:
    groups = [part.unflatten(0, (model.query_groups, -1, model.head_size)) for part in parts]
    return torch.cat(groups, 1).flatten(0, 2)


class Weights(ABC):
    """Weights to start a run from, by engine torch's names, read one by one."""

    model: Model
    names: Sequence[str]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Returns a whole weight; the token table has no padding, and the position table as many rows as stored."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names)

    @abstractmethod
    def close(self) -> None:
        """Lets go of files and tensors: nothing is read after that."""

    def __deepcopy__(self, memo: object) -> "Weights":
        return self  # nothing in it changes


class Pretrained(Weights):
    """Weights with transformers' names (``hf:DIR``, ``deepspeed:DIR``).

    A part may precede all names, if the model was inside another one, and a base model's names lack their first part.
    """

    def __init__(self, stored: Stored, model: Model) -> None:
        self.folder, self.model = stored.folder, model
        self.family = family_of(model, stored.names)
        self.names = names_of(model)
        self._stored = stored
        self._naming = StoredNames.of(stored.names, self.family, str(self.folder))

    @classmethod
    def of(cls, folder: Path, experiment: Experiment, tokens: int) -> "Pretrained":
        """Opens a transformers folder. Raises :class:`RequestError` with every difference from the experiment's model,
        and with all that is missing in the folder."""
        stored = Safetensors(folder)
        return cls(stored, checked_model(experiment.model, stored.found, tokens))

    def stored_name(self, target: str) -> str:
        """Returns the stored name of a weight of transformers' model. Raises :class:`RequestError` if it is missing."""
        name = self._naming.stored(target)
        if name not in self._stored.names:
            raise RequestError(Problem(str(self.folder), "lacks a weight", target, DOWNLOAD))
        return name

    def close(self) -> None:
        del self._stored

    def read(self, name: str) -> Tensor:
        stored = map(self.stored_name, target_names(self.family, name))
        parts = [finite(self._stored.read(one), one, self.folder) for one in stored]
        parts = [part.t().contiguous() if is_transposed(self.family, name, part.dim()) else part for part in parts]
        if (half := half_of(self.family, name)) is not None:
            return parts[0].chunk(2)[half]
        if ".query_key_value." not in name:
            return parts[0]
        if len(parts) == 1:
            key = self.model.key_size
            parts = list(parts[0].split([self.model.attention_size, key, key]))
        return _join_heads(self.model, parts)


def finite(weight: Tensor, name: str, folder: Path) -> Tensor:
    """Returns a weight of ``folder``. Raises :class:`RequestError` if an element is not finite."""
    odd = next((it for it in map(float, weight.aminmax()) if not math.isfinite(it)), None)  # without a copy
    if odd is not None:
        todo = "download it again, or load weights from before the training diverged"
        raise RequestError(Problem(f"{folder}: {name}", "has elements that are not finite", str(odd), todo))
    return weight


def checked_model(model: Model, stored: StoredWeights, tokens: int) -> Model:
    """Returns an experiment's model with ``tokens`` in its vocabulary.

    Raises :class:`RequestError` with every difference from what is stored.
    """
    RequestError.raise_for(weights_problems(model, stored, tokens))
    return model.model_copy(update={"vocab_size": tokens})
