"""megatron-core's distributed checkpoints, written by the ranks themselves.

megatron-core forks processes that write, and a manager that collects their results. A rank's threads (Gloo's, NCCL's)
do not survive a fork, and a leftover process keeps the rank's output open. Here the rank, or one of its threads, calls
megatron-core's write function instead.
"""

import queue
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from tridock.train.checkpoints.adam_state import fresh_state
from tridock.train.checkpoints.pickles import safe_distributed_load
from tridock.train.checkpoints.sharded import known_to_leaders, write_index
from tridock.train.checkpoints.snapshot import Write, tensor_on_host, wait_for_copies
from tridock.train.checkpoints.write_errors import defer_write_errors, replaced

_COMMON: Final = "common.pt"
FILES = (".metadata", _COMMON, "metadata.json")
"""The files of a checkpoint that every rank reads, besides the tensors that it needs."""
_FORMAT: Final = ("torch_dist", 1)


class _Planner(TorchDistSaveShardedStrategy):
    """Plans what each rank writes, each tensor once on each file system, and leaves the writing to :func:`save`."""

    def __init__(self, leaders: Sequence[int]) -> None:
        super().__init__(*_FORMAT)
        self._leaders = leaders

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path, *newer: str) -> AsyncRequest:
        # 0.19 has it among the tensors, and loads either; 0.16 has a file.
        common = sharded_state_dict.pop("common_state", None)
        if common is not None and dist.get_rank() == 0:
            torch.save(common.data, Path(checkpoint_dir) / _COMMON)
        if len(set(self._leaders)) > 1:
            _choose_replicas(list(nested_values(sharded_state_dict)), self._leaders)
        return super().async_save(sharded_state_dict, checkpoint_dir, *("mcore" for _ in newer))

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *_: str) -> AsyncRequest:
        _, metadata, _ = save_state_dict_ret
        return AsyncRequest(None, (writer, metadata), [])


def _choose_replicas(parts: Sequence[Any], leaders: Sequence[int]) -> None:
    """Makes megatron-core write each part from the first rank on each file system that holds it. A collective."""
    held = {_place(part): part.replica_id for part in parts}
    of_all: list[dict[Any, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_all, held)
    rank = dist.get_rank()
    sharing = [number for number, leader in enumerate(leaders) if leader == leaders[rank]]
    for part in parts:
        place = _place(part)
        holders = [(of_all[number][place], number) for number in sharing if place in of_all[number]]
        part.replica_id = 0 if min(holders) == (held[place], rank) else 1


def _place(part: ShardedTensor | ShardedObject) -> tuple[Any, ...]:
    return (part.key, part.global_offset, *((part.local_shape,) if isinstance(part, ShardedTensor) else ()))


def save(state: dict[str, Any], folder: Path, leaders: Sequence[int], background: dist.ProcessGroup | None) -> Write:
    """Plans to write each tensor once on each file system, from one of the ranks there that hold it; returns the
    function that writes. ``leaders`` are the ranks that lead each rank's file system.

    With a group ``background``, that function writes a copy. Both are collectives, which all ranks complete: if this
    rank cannot write, its error is raised at the end; if another rank cannot, FILES are missing in the checkpoint.
    """
    filesystem_async._results_queue = queue.Queue()
    with defer_write_errors((torch, "save")):
        request = dist_checkpointing.save(state, str(folder), _Planner(leaders), async_sharded_save=True)
    writer, metadata = request.async_fn_args
    buckets = [
        (path, name, (others, _on_host(tensors, background))) for path, name, (others, tensors) in writer.write_buckets
    ]
    wait_for_copies()
    return partial(_write, writer, metadata, buckets, leaders, background)


def _on_host(tensors: list[tuple[Any, Tensor]], background: dist.ProcessGroup | None) -> list[tuple[Any, Tensor]]:
    return [(it, tensor if background is None and tensor.is_cpu else tensor_on_host(tensor)) for it, tensor in tensors]


def _write(
    writer: Any, metadata: Any, buckets: Sequence[Any], leaders: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    error: Exception | None = None
    written: list[Any] = []
    try:
        for bucket in buckets:
            written += _write_file(writer, bucket)
    except Exception as raised:
        error = raised
    of_all: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(written if error is None else None, of_all, group=group)
    known = None
    if of_all is not None and None not in of_all:
        with suppress(OSError):  # then it is missed in the checkpoint
            known = metadata, of_all, (Path(writer.checkpoint_id) / _COMMON).read_bytes()
    found = known_to_leaders(known, leaders, group)
    if error is not None:
        raise error
    if found is not None:
        _finish(writer, *found, leaders)


def _finish(writer: Any, metadata: Any, of_all: Sequence[list[Any]], common: bytes, leaders: Sequence[int]) -> None:
    """Writes on this rank's file system what megatron-core writes on rank 0 alone."""
    folder = Path(writer.checkpoint_id)
    write_index(writer, metadata, of_all, leaders)
    if dist.get_rank() != 0:
        (folder / _COMMON).write_bytes(common)
    save_config(CheckpointingConfig(*_FORMAT), str(folder))


def _write_file(writer: Any, bucket: Any) -> list[Any]:
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    count.put(0)
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    writer.write_preloaded_data(transforms, 0, bucket, results, count, use_fsync=True, use_msc=writer.use_msc)
    _, written = results.get()
    if isinstance(written, Exception):
        raise written
    return list(written)


def shard_files(state: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Returns the names of the files from which :func:`load` reads this rank's part. A collective."""

    def plan(wanted: Any, reader: Any, planner: Any, **_: Any) -> None:
        planner.set_up_planner(wanted, metadata := reader.read_metadata())
        raise _PlannedError(
            {metadata.storage_data[it.storage_index].relative_path for it in planner.create_local_plan().items}
        )

    try:
        # 0.16 calls one, 0.19 the other.
        with replaced(strategy.checkpoint, "load_state_dict", plan), replaced(strategy.checkpoint, "load", plan):
            load(state, folder)
    except _PlannedError as planned:
        return tuple(planned.files)
    raise AssertionError("megatron-core has read without a plan")


class _PlannedError(Exception):
    """Ends a load before anything is read."""

    def __init__(self, files: set[str]) -> None:
        super().__init__(files)
        self.files = files


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Loads this rank's part of a checkpoint of any layout into ``state``, and returns it. A collective."""
    with safe_distributed_load():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def keep_padding(optimizer: Any) -> None:
    """Makes the optimizer save each weight's states from its real place in the buffer.

    megatron-core concatenates the buckets without the padding between them, but then reads each weight at its place in
    the buffer with padding (its own note: issue 504). All states after the first padded bucket would be shifted.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        return
    collect = optimizer.get_parameter_state_dp_zero

    def collected(*given: Any, **named: Any) -> Any:
        state = collect(*given, **named)
        for number, buffer in enumerate(optimizer.buffers if state is not None else ()):
            for tensors in state[number].values():
                tensors |= {name: _padded(it, buffer) for name, it in tensors.items() if isinstance(it, Tensor)}
        return state

    optimizer.get_parameter_state_dp_zero = collected


def _padded(states: Tensor, buffer: Any) -> Tensor:
    whole, start = states.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = states[start:end]
        start = end
    return whole


def before_load(optimizer: Any) -> None:
    """Creates the states that the first step would create, and keeps their step count, which checkpoints lack."""
    if not isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer.optimizer, torch.optim.AdamW):
        return
    states = optimizer.optimizer.state
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            if not states[parameter]:
                states[parameter] = fresh_state(optimizer.optimizer, parameter)
    set_states = optimizer._set_main_param_and_optimizer_states
    get_states = optimizer._get_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda parameter, loaded: set_states(
        parameter, {**get_states(parameter), **loaded}
    )


def after_load(optimizer: Any) -> None:
    """Gives each parameter its own step count: a shared tensor would be incremented once per parameter."""
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
