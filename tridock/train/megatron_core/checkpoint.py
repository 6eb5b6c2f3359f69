"""megatron-core's distributed checkpoints, written by the ranks themselves.

megatron-core forks processes that write, and starts a manager that collects their results. A rank's threads (Gloo's,
NCCL's) do not survive a fork, and a leftover process keeps the rank's output open: here the rank itself calls the
function that writes.
"""

import queue
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tridock.train.checkpoints.adam_state import fresh_state
from tridock.train.checkpoints.pickles import safe_metadata_load
from tridock.train.checkpoints.write_errors import defer_write_errors

FILES = (".metadata", "common.pt", "metadata.json")
"""What every rank reads of a checkpoint, besides the tensors that it needs."""


def save(state: dict[str, Any], folder: Path) -> None:
    """Writes each tensor once, from one of the ranks that hold it. A collective, which all ranks complete.

    If this rank cannot write, its error is raised at the end; if another cannot, the checkpoint lacks FILES.
    """
    writer = filesystem_async.FileSystemWriterAsync
    places = ((torch, "save"), (writer, "finish"), (serialization, "save_config"))
    with defer_write_errors(*places) as kept, suppress(CheckpointException):
        filesystem_async._results_queue = queue.Queue()
        writer.write_preloaded_data_multiproc = staticmethod(partial(write, kept))
        dist_checkpointing.save(state, str(folder))


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fills ``state`` with what this rank needs, whoever wrote it. A collective."""
    with safe_metadata_load():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def write(
    kept: list[Exception],
    transforms: Any,
    use_msc: bool,
    _rank: int,
    buckets: Sequence[Any],
    results: queue.Queue[Any],
) -> None:
    """One file after another. megatron-core gets each write error, passes it to all ranks, and ``kept`` records it."""
    written = {}
    for number, bucket in enumerate(buckets):
        answers: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answers, count, use_fsync=True, use_msc=use_msc
        )
        _, written[number] = answers.get()
        if isinstance(written[number], Exception):
            kept.append(written[number])
            results.put(written[number])
            return
    results.put(written)


def keep_padding(optimizer: Any) -> None:
    """Saves each weight's states from where they are.

    megatron-core collects the buckets without the padding between them, and then takes each weight from its place in
    the buffer with the padding (its own note: issue 504). Behind the first padded bucket all would be shifted.
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
    """Makes the states that the first step would make, and keeps their count out of what is loaded beside it."""
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
    """Gives each parameter a count of its own: loaded as one tensor, it would go up once a parameter."""
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
