"""Reads the weights of a checkpoint of any engine and layout, one whole weight at a time.

Files are memory-mapped, or read tensor by tensor. Names are those of engine torch's model.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tridock.contracts.pretrained import one_model_rank
from tridock.experiment.model import Model
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights
from tridock.train.checkpoints.megatron_lm import megatron_lm_weights
from tridock.train.checkpoints.pickles import safe_metadata_load, safe_torch_load
from tridock.train.megatron_core.names import expert_of, half_of, key_of

_MODEL: Final = "mp_rank_00_model_states.pt"


def weights_in(folder: Path, model: Model) -> Callable[[str], Tensor]:
    """Returns a function that reads a weight of the checkpoint in ``folder`` by its name."""
    if (folder / "ddp.pt").is_file():
        state = torch.load(folder / "ddp.pt", map_location="cpu", mmap=True, weights_only=True)["model"]
        return lambda name: state[name]
    if (folder / ".metadata").is_file():
        read = _distributed(folder)
        is_megatrons = (folder / "common.pt").is_file()
        return _parts(model, read) if is_megatrons else lambda name: read(f"model.{name}")
    if (read := megatron_lm_weights(folder, model)) is not None:
        return read
    if (folder / _MODEL).is_file():
        with safe_torch_load():
            module = torch.load(folder / _MODEL, map_location="cpu", mmap=True, weights_only=True)["module"]
        return lambda name: module[name]
    return DeepSpeedWeights(folder, one_model_rank(folder)).read


def _distributed(folder: Path) -> Callable[[str], Tensor]:
    with safe_metadata_load():
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata

    def read(key: str) -> Tensor:
        tensor = torch.empty(known[key].size, dtype=known[key].properties.dtype)
        with safe_metadata_load(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load({key: tensor}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return tensor

    return read


def _parts(model: Model, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads megatron-core's weights. A layer's experts are two tensors, kept until the next layer is read."""
    of_experts = lru_cache(maxsize=2)(read)

    def part(name: str) -> Tensor:
        expert, key = expert_of(name), key_of(model, name)
        return _part(model, name, read(key) if expert is None else of_experts(key)[expert])

    return part


def _part(model: Model, name: str, whole: Tensor) -> Tensor:
    half = half_of(model, name)
    return whole if half is None else whole.chunk(2)[half]
