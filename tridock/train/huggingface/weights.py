"""Converts weights between the names and layouts of engine torch and those of Hugging Face's transformers.

Engine torch and megatron-core both order a layer's queries, keys and values group by group. megatron-core stores
SwiGLU's two matrices as one, and each norm with the matrix that follows it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tridock.contracts.pretrained import CONFIG
from tridock.engines import as_yaml
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.train.huggingface.families import Family, family_of, model_fields
from tridock.train.huggingface.stored import Safetensors, Stored, read_config
from tridock.train.models.gpt import GPT, Shape

Read = Callable[[str], Tensor]
"""Returns a whole weight by its name in engine torch's model."""
_LAYER: Final = re.compile(r"^layers\.(\d+)\.(.+)$")
_EXPERT: Final = re.compile(r"^experts\.(\d+)\.(.+)$")
TOKEN_TABLE: Final = "token_embedding.weight"  # noqa: S105 - no password
_VOCABULARY: Final = (TOKEN_TABLE, "output_layer.weight")


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
        targets = _targets(family, name)
        if name in _VOCABULARY:
            tensor = tensor[:tokens]
        parts = _split_heads(model, tensor) if ".query_key_value." in name else [tensor]
        if len(targets) < len(parts):
            parts = [torch.cat(parts)]
        for target, part in zip(targets, parts, strict=True):
            yield target, (part.t() if _is_transposed(family, name, part) else part).contiguous()


def _targets(family: Family, name: str) -> list[str]:
    """Returns transformers' name of a weight, or the names of its three parts."""
    layer = _LAYER.match(name)
    module, _, kind = (layer[2] if layer else name).rpartition(".")
    if expert := _EXPERT.match(module):
        module, prefix = f"experts.{expert[2]}", f"{family.names['experts']}.{expert[1]}."
        return [f"{family.names['layers']}.{layer[1] if layer else ''}.{prefix}{family.names[module]}.{kind}"]
    modules = family.query_key_value if module == "attention.query_key_value" else (family.names[module],)
    prefix = f"{family.names['layers']}.{layer[1]}." if layer else ""
    return [f"{prefix}{one}.{kind}" for one in modules]


def _is_transposed(family: Family, name: str, tensor: Tensor) -> bool:
    return family.transposes and tensor.dim() == 2 and "embedding" not in name


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
        self.family = family_of(model)
        self.names = names_of(model)
        self._stored = stored
        self._prefix, self._base = self._surroundings()

    @classmethod
    def of(cls, folder: Path, experiment: Experiment, tokens: int) -> "Pretrained":
        """Opens a transformers folder. Raises :class:`RequestError` with every difference from the experiment's model,
        and with all that is missing in the folder."""
        model = checked_model(folder, experiment, tokens)
        found = cls(Safetensors(folder), model)
        found.require_all()
        return found

    def require_all(self) -> set[str]:
        """Returns the stored names of all weights. Raises :class:`RequestError` if one is missing."""
        targets = [target for name in self.names for target in _targets(self.family, name)]
        return {self.stored_name(target) for target in targets}

    def stored_name(self, target: str) -> str:
        """Returns the stored name of a weight of transformers' model. Raises :class:`RequestError` if it is missing."""
        name = self.renamed(target)
        if name not in self._stored.names:
            raise RequestError(Problem(str(self.folder), "lacks a weight", target, "download the complete model"))
        return name

    def close(self) -> None:
        del self._stored

    def renamed(self, target: str) -> str:
        """Returns the name that a weight of transformers' model has here, if it is there."""
        return self._prefix + target.removeprefix(self._base)

    def read(self, name: str) -> Tensor:
        parts = [self._stored.read(self.stored_name(target)) for target in _targets(self.family, name)]
        parts = [part.t().contiguous() if _is_transposed(self.family, name, part) else part for part in parts]
        if ".query_key_value." not in name:
            return parts[0]
        if len(parts) == 1:
            key = self.model.key_size
            parts = list(parts[0].split([self.model.attention_size, key, key]))
        return _join_heads(self.model, parts)

    def _surroundings(self) -> tuple[str, str]:
        """Returns what precedes the stored names, and what they lack at their beginning."""
        (first,) = _targets(self.family, self.names[0])
        base = f"{first.partition('.')[0]}."
        for known, lacking in ((first, ""), (first.removeprefix(base), base)):
            found = [name for name in self._stored.names if name == known or name.endswith(f".{known}")]
            if len(found) > 1:
                todo = "save one of the models alone"
                raise RequestError(Problem(str(self.folder), "holds several models", ", ".join(sorted(found)), todo))
            if found:
                return found[0].removesuffix(known), lacking
        return "", ""


def checked_model(folder: Path, experiment: Experiment, tokens: int) -> Model:
    """Returns an experiment's model with ``tokens`` in its vocabulary.

    Raises :class:`RequestError` with every difference from ``config.json``.
    """
    fields = model_fields(read_config(folder), str(folder / CONFIG))
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    theirs = Model.model_validate({"seq_length": model.seq_length, **fields})
    if model.rotary_size and model.positions <= theirs.positions:
        del fields["max_position_embeddings"]  # without a position table, shorter samples use the same model
    pairs = ((name, _meaning(theirs, name), _meaning(model, name)) for name in fields)
    if problems := [
        Problem(f"model.{name}", f"the model in {folder} has {there}", str(here), f"set it to {as_yaml(there)}")
        for name, there, here in pairs
        if there != here
    ]:
        raise RequestError(problems)
    return model


_SIZES: Final = {
    "kv_channels": "head_size",
    "num_query_groups": "query_groups",
    "ffn_hidden_size": "ffn_size",
    "moe_ffn_hidden_size": "expert_size",
    "max_position_embeddings": "positions",
    "activation_func": "gelu",
}


def _meaning(model: Model, name: str) -> Any:
    """Returns the value of a field, or its default size if it is omitted."""
    return getattr(model, _SIZES.get(name, name))
