"""The weights of a checkpoint, one whole weight at a time, whatever engine and layout wrote it.

Files are memory-mapped, or read by tensor. Names are those of engine torch's model.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tridock.contracts.checkpoints import ZERO_RANK
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.train.checkpoints.pickles import safe_metadata_load, safe_torch_load
from tridock.train.checkpoints.zero_reshard import gather_slice
from tridock.train.megatron_core.names import half_of, key_of

_MODEL: Final = "mp_rank_00_model_states.pt"


def weights_in(folder: Path, model: Model) -> Callable[[str], Tensor]:
    """A function that reads a weight of the checkpoint in ``folder`` by its name."""
    if (folder / "ddp.pt").is_file():
        state = torch.load(folder / "ddp.pt", map_location="cpu", mmap=True, weights_only=True)["model"]
        return lambda name: state[name]
    if (folder / ".metadata").is_file():
        read = _distributed(folder)
        is_megatrons = (folder / "common.pt").is_file()
        return (
            (lambda name: _part(model, name, read(key_of(name))))
            if is_megatrons
            else lambda name: read(f"model.{name}")
        )
    if (folder / _MODEL).is_file():
        module = _deepspeeds(folder / _MODEL)["module"]
        return lambda name: module[name]
    return _zero_3(folder)


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


def _part(model: Model, name: str, whole: Tensor) -> Tensor:
    half = half_of(model, name)
    return whole if half is None else whole.chunk(2)[half]


def _deepspeeds(file: Path) -> dict[str, Any]:
    with safe_torch_load():
        state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return state


def _zero_3(folder: Path) -> Callable[[str], Tensor]:
    """Of ZeRO 3 each rank has a partition of each weight, one after another in flat fp32 vectors."""
    files = sorted(folder.glob("*_optim_states.pt"), key=_rank)
    models = sorted(folder.glob("*_model_states.pt"), key=_rank)
    if not files or not models:
        todo = "name a run that engine torch or megatron-core has saved"
        raise RequestError(Problem(str(folder), "holds no checkpoint of a known format", "", todo))
    flats = [_deepspeeds(file)["optimizer_state_dict"]["fp32_flat_groups"] for file in files]
    groups = _deepspeeds(models[0])["param_shapes"]
    places, offset = {}, 0
    for group in groups:
        for name, shape in group.items():
            places[name] = (offset, shape)
            offset += -(-shape.numel() // len(files))

    def read(name: str) -> Tensor:
        start, shape = places[name]
        share = -(-shape.numel() // len(flats))
        parts = [gather_slice(flat, start, share) for flat in flats]
        return torch.cat(parts)[: shape.numel()].view(shape)

    return read


def _rank(file: Path) -> int:
    found = ZERO_RANK.search(file.name)
    return int(found[1]) if found else 0
