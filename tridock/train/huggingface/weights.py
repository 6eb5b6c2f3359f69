"""Converts weights between the names and layouts of engine torch and those of Hugging Face's transformers.

Engine torch and megatron-core both order a layer's queries, keys and values group by group. megatron-core stores
SwiGLU's two matrices as one, and each norm with the matrix that follows it.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tridock.engines import as_yaml
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.train.huggingface.families import Family, family_of, model_fields
from tridock.train.models.gpt import GPT, Shape

Read = Callable[[str], Tensor]
"""Returns a whole weight by its name in engine torch's model."""
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_LAYER: Final = re.compile(r"^layers\.(\d+)\.(.+)$")
_EXPERT: Final = re.compile(r"^experts\.(\d+)\.(.+)$")
_VOCABULARY: Final = ("token_embedding.weight", "output_layer.weight")


def names_of(model: Model) -> list[str]:
    """Returns engine torch's names of a model's weights, in the order of the forward pass."""
    with torch.device("meta"):
        names = [name for name, _ in GPT(Shape(model, 1)).named_parameters()]
    return sorted(names, key=lambda name: name.startswith(("final_norm", "output_layer")))


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


class Pretrained:
    """The weights in a transformers folder (``hf:DIR``), by engine torch's names."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder, self.model = folder, model
        self.family = family_of(model)
        self.names = names_of(model)

    @classmethod
    def of(cls, folder: Path, experiment: Experiment, tokens: int) -> "Pretrained":
        """Opens a folder. Raises :class:`RequestError` with every difference from the experiment's model, and with all
        that is missing in the folder."""
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
        found = cls(folder, model)
        for name in found.names:
            for target in _targets(found.family, name):
                found._file_of(target)
        return found

    def read(self, name: str) -> Tensor:
        """Returns a weight; the token table has no padding, and the position table as many rows as in the folder."""
        parts = [self._tensor(target) for target in _targets(self.family, name)]
        parts = [part.t().contiguous() if _is_transposed(self.family, name, part) else part for part in parts]
        if ".query_key_value." not in name:
            return parts[0]
        if len(parts) == 1:
            key = self.model.key_size
            parts = list(parts[0].split([self.model.attention_size, key, key]))
        return _join_heads(self.model, parts)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names)

    def __deepcopy__(self, memo: object) -> "Pretrained":
        return self  # nothing in it changes

    @cached_property
    def _files(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            return dict(json.loads(index.read_bytes())["weight_map"])
        with self._open(SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def _file_of(self, target: str) -> tuple[str, str]:
        """Returns the stored name of a weight and its file; a base model's names lack the first part."""
        for name in (target, target.partition(".")[2]):
            if name in self._files:
                return name, self._files[name]
        raise RequestError(Problem(str(self.folder), "lacks a weight", target, "download the complete model"))

    def _tensor(self, target: str) -> Tensor:
        name, file = self._file_of(target)
        with self._open(file) as opened:
            return opened.get_tensor(name)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            todo = "download all of the model, with its weights as safetensors"
            raise RequestError(Problem(str(self.folder / file), "cannot be read", str(error), todo)) from None


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a transformers folder. Raises :class:`RequestError` if it cannot be read."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = "name a folder that transformers' save_pretrained has written, with config.json and model.safetensors"
        raise RequestError(Problem(str(folder / CONFIG), "cannot be read", got, todo)) from None
    return config


_SIZES: Final = {
    "kv_channels": "head_size",
    "num_query_groups": "query_groups",
    "ffn_hidden_size": "ffn_size",
    "moe_ffn_hidden_size": "expert_size",
    "max_position_embeddings": "positions",
}


def _meaning(model: Model, name: str) -> Any:
    """Returns the value of a field, or its default size if it is omitted."""
    return getattr(model, _SIZES.get(name, name))
