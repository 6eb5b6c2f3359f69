"""The weights of a checkpoint of Megatron-LM v1.1.5, whatever its strategy, tensor and pipeline parallel sizes."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tridock.experiment.model import Model
from tridock.train.checkpoints.pickles import megatron_classes, safe_torch_load
from tridock.train.checkpoints.zero_3 import Zero3

Shards = Callable[[str], Sequence[Tensor]]
"""Returns the parts of a weight, one for each tensor parallel rank, by its name in v1.1.5's language model."""
_LAYER: Final = re.compile(r"^layers\.(\d+)\.(.+)\.(weight|bias)$")
_IN_LAYER: Final = {
    "input_norm": "input_layernorm",
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "dense_h_to_4h": "mlp.dense_h_to_4h",
    "dense_4h_to_h": "mlp.dense_4h_to_h",
}
_OUTSIDE: Final = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "final_norm": "transformer.final_layernorm",
}
_BY_COLUMNS: Final = ("token_embedding.weight", ".query_key_value.weight", ".query_key_value.bias", "dense_h_to_4h.")
_BY_ROWS: Final = ("attention.dense.weight", "dense_4h_to_h.weight")
_EMBEDDING: Final = "layer_00-model_00-model_states.pt"


def megatron_lm_weights(folder: Path, model: Model) -> Callable[[str], Tensor] | None:
    """Returns a function that reads a weight by its name in engine torch; None if v1.1.5 did not write the checkpoint.

    Queries, keys and values are ordered head by head, as in engine torch.
    """
    shards = _shards(folder, model)
    if shards is None:
        return None

    def read(name: str) -> Tensor:
        parts = shards(_name_of(name))
        if len(parts) > 1 and any(kind in name for kind in _BY_COLUMNS):
            return torch.cat(list(parts))
        if len(parts) > 1 and name.endswith(_BY_ROWS):
            return torch.cat(list(parts), 1)
        return parts[0]

    return read


def _name_of(name: str) -> str:
    if layer := _LAYER.match(name):
        return f"transformer.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
    module, _, kind = name.partition(".")
    return f"{_OUTSIDE[module]}.{kind}"


def _shards(folder: Path, model: Model) -> Shards | None:
    if (folder / _EMBEDDING).is_file():
        return lambda name: _of_stages(folder, model, name)
    if files := sorted(folder.glob("mp_rank_??/model_optim_rng.pt")):
        return _of_models([_load(file)["model"] for file in files])
    if files := sorted(folder.glob("mp_rank_??_model_states.pt")):
        modules = [_load(file)["module"] for file in files]
        return _of_models(modules) if "language_model" in modules[0] else None
    files = sorted(folder.glob("zero_pp_rank_0_mp_rank_??_model_states.pt"))
    zero = [Zero3(folder, f"mp_rank_{number:02d}") for number in range(len(files))]
    if not zero or not any(name.startswith("language_model.") for name in zero[0].names):
        return None
    return lambda name: [one.read(f"language_model.{name}") for one in zero]


def _of_models(models: Sequence[Mapping[str, Any]]) -> Shards:
    def shards(name: str) -> list[Tensor]:
        part, _, rest = name.partition(".")
        if part == "transformer":
            return [model["language_model"][part][rest] for model in models]
        table, _, kind = rest.partition(".")
        return [model["language_model"][part][table][kind] for model in models]

    return shards


def _of_stages(folder: Path, model: Model, name: str) -> list[Tensor]:
    """Reads a weight from a pipeline's checkpoint; returns one tensor per tensor parallel rank.

    The checkpoint has a file per layer, numbered like the modules of ``GPT2ModelPipe``.
    """
    number, key = 0, name.removeprefix("embedding.")
    if layer := re.match(r"transformer\.layers\.(\d+)\.(.+)", name):
        number, key = int(layer[1]) + 2, layer[2]
    elif name.startswith("transformer.final_layernorm."):
        number, key = model.num_layers + 3, name.rpartition(".")[2]
    return [_load(file)[key] for file in sorted(folder.glob(f"layer_{number:02d}-model_??-model_states.pt"))]


def _load(file: Path) -> Any:
    with safe_torch_load(megatron_classes()):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
