"""Checkpoints of sharded weights in torch's distributed format (DCP): they load on any mesh of ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from tridock.train.checkpoints.adam_state import VECTORS, fresh_state
from tridock.train.checkpoints.pickles import safe_distributed_load
from tridock.train.checkpoints.write_errors import write_failure
from tridock.train.parallel.update import LossScaler

FILES: Final = (".metadata",)
"""Files that every rank reads, besides those with its tensors."""
_SCALER: Final = ("scale", "good_steps", "overflows_left")

Named = Iterable[tuple[str, nn.Parameter]]
Buffers = Mapping[str, Tensor]
"""Batch normalization statistics by name, the same on all ranks."""
T = TypeVar("T")
Written = tuple[Metadata, list[list[WriteResult]]]
"""What a checkpoint holds, and where each rank has written its tensors."""


def state_of(named: Named, buffers: Buffers, optimizer: torch.optim.Optimizer, scaler: LossScaler) -> dict[str, Tensor]:
    """Returns the contents of a checkpoint: tensors by their names in the whole model."""
    return {**tensors_of(named, buffers, optimizer), "loss_scaler": _values(scaler)}


def tensors_of(named: Named, buffers: Buffers, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the weights, buffers and optimizer states on the rank's device, by name."""
    return {**dict(_tensors(named, optimizer)), **{f"model.{name}": tensor for name, tensor in buffers.items()}}


def write(state: dict[str, Tensor], folder: Path, leaders: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Writes each tensor once on each file system, from one of the ranks there that hold it. A collective.

    ``leaders`` are the ranks that lead each rank's file system. Raises a write error of any rank on all of them.
    """
    writer = _Writer(folder)
    try:
        dcp.save(state, storage_writer=writer, planner=_Planner(leaders), process_group=group)
    except CheckpointException as error:
        failures = [failure[0] for failure in error.failures.values()]
        raise next((one for one in failures if write_failure(one) is not None), error) from error
    written = known_to_leaders(writer.written, leaders, group)
    if written is not None:
        write_index(writer, *written, leaders)


def known_to_leaders(known: T, leaders: Sequence[int], group: dist.ProcessGroup | None) -> T | None:
    """Returns what rank 0 knows on the ranks that lead a file system, and None on the others. A collective.

    The last one of a save: a rank that cannot write what it got leaves no other one waiting.
    """
    found = [known]
    if len(set(leaders)) > 1:
        dist.broadcast_object_list(found, src=0, group=group)
    return found[0] if dist.get_rank() in leaders else None


def write_index(
    writer: FileSystemWriter, metadata: Metadata, results: Sequence[list[WriteResult]], leaders: Sequence[int]
) -> None:
    """Writes ``.metadata`` of this rank's file system: of several copies of a tensor it names the one that is here."""
    here = [leader == dist.get_rank() for leader in leaders]
    order = sorted(range(len(results)), key=lambda number: here[number])  # the last one counts
    FileSystemWriter.finish(writer, metadata, [results[number] for number in order])


class _Planner(dcp.DefaultSavePlanner):
    """torch's planner writes a tensor that several ranks hold once; this one does for each file system."""

    def __init__(self, leaders: Sequence[int]) -> None:
        super().__init__()
        self._leaders = leaders

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        if len(set(self._leaders)) > 1:
            for leader in set(self._leaders):
                ranks = [rank for rank, its in enumerate(self._leaders) if its == leader]
                for rank, plan in zip(ranks, dedup_save_plans([all_plans[rank] for rank in ranks]), strict=True):
                    plans[rank] = plan
        return plans, metadata


class _Writer(FileSystemWriter):
    """Leaves ``.metadata`` to :func:`write_index`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: Written | None = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.written = metadata, results


def files_of(state: dict[str, Tensor], folder: Path) -> tuple[str, ...]:
    """Returns the names of the files that :func:`load` reads into this state, by the checkpoint's ``.metadata``."""
    with safe_distributed_load():
        metadata = dcp.FileSystemReader(folder).read_metadata()
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(state, metadata)
        items = planner.create_local_plan().items
    return tuple({metadata.storage_data[item.storage_index].relative_path for item in items})


def load(named: Named, buffers: Buffers, optimizer: torch.optim.Optimizer, scaler: LossScaler, folder: Path) -> None:
    """Loads this rank's weights and optimizer states, from a checkpoint of any layout. A collective."""
    state = state_of(named, buffers, optimizer, scaler)
    with safe_distributed_load():
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
