"""Checkpoints of sharded weights in torch's distributed format (DCP): they load on any mesh of ranks."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from tridock.train.checkpoints.adam_state import VECTORS, fresh_state
from tridock.train.checkpoints.pickles import safe_metadata_load
from tridock.train.checkpoints.write_errors import write_failure
from tridock.train.parallel.loss_scale import LossScaler

FILES: Final = (".metadata",)
"""Files that every rank reads, besides those with its tensors."""
_SCALER: Final = ("scale", "good_steps", "overflows_left")

Named = Iterable[tuple[str, nn.Parameter]]
Buffers = Mapping[str, Tensor]
"""Batch normalization statistics by name, the same on all ranks."""


def state_of(named: Named, buffers: Buffers, optimizer: torch.optim.Optimizer, scaler: LossScaler) -> dict[str, Tensor]:
    """Returns the contents of a checkpoint: tensors by their names in the whole model."""
    return {**tensors_of(named, buffers, optimizer), "loss_scaler": _values(scaler)}


def tensors_of(named: Named, buffers: Buffers, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the weights, buffers and optimizer states on the rank's device, by name."""
    return {**dict(_tensors(named, optimizer)), **{f"model.{name}": tensor for name, tensor in buffers.items()}}


def write(state: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes each tensor once, from one of the ranks that hold it. A collective that every rank completes.

    Raises a write error of any rank on all of them.
    """
    try:
        dcp.save(state, checkpoint_id=str(folder), process_group=group)
    except CheckpointException as error:
        failures = [failure[0] for failure in error.failures.values()]
        raise next((one for one in failures if write_failure(one) is not None), error) from error


def load(named: Named, buffers: Buffers, optimizer: torch.optim.Optimizer, scaler: LossScaler, folder: Path) -> None:
    """Loads this rank's weights and optimizer states, from a checkpoint of any layout. A collective."""
    state = state_of(named, buffers, optimizer, scaler)
    with safe_metadata_load():
        dcp.load(state, checkpoint_id=str(folder))
    values = state["loss_scaler"]
    scaler.restore(dict(zip(_SCALER, values.tolist(), strict=True)))


def _values(scaler: LossScaler) -> Tensor:
    state = scaler.state()
    return torch.tensor([state[name] for name in _SCALER], dtype=torch.float64)


def _tensors(named: Named, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in named:
        yield f"model.{name}", parameter.detach()
        entry = optimizer.state[parameter]
        if not entry:  # before the first step
            entry.update(fresh_state(optimizer, parameter))
        yield f"optimizer.{name}.step", entry["step"]
        for key in VECTORS:
            yield f"optimizer.{name}.{key}", entry[key]
