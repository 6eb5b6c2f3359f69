"""The files in which a rank's DeepSpeed keeps states on NVMe (ZeRO-Infinity), and checkpoints of them.

DeepSpeed 0.19.8's own checkpoint of such states does not resume: it copies each rank's swap files, then loads nothing
but them, and fails to start with ``offload_param``. Here a rank writes from its swap files what it would write from
memory into an ordinary ZeRO-3 checkpoint, and loads the file group by group, as an optimizer step moves the groups.
"""

import atexit
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from tridock.errors import Problem, RequestError
from tridock.train.checkpoints.write_errors import replaced
from tridock.train.rank.process_group import Ranks

DEEPSPEED: Final = "0.19.8"
"""Its checkpoints of such states do not resume; ours read and write what lies behind them."""


def config_of_rank(config: Mapping[str, Any], model: nn.Module, run: str, ranks: Ranks) -> dict[str, Any]:
    """Returns the run's DeepSpeed configuration with a folder of this rank's own, which exists until it exits.

    Without a ``buffer_size``, a buffer has room for the rank's part of any of the model's weights.
    """
    import deepspeed

    if deepspeed.__version__ != DEEPSPEED:
        what = f"device nvme works with DeepSpeed {DEEPSPEED}"
        todo = "use an image with it, or set device to cpu"
        raise RequestError(Problem("deepspeed.zero_optimization", what, deepspeed.__version__, todo))
    zero = dict(config["zero_optimization"])
    largest = max(-(-parameter.numel() // ranks.world_size) for parameter in model.parameters())
    for name, default in (("offload_optimizer", {}), ("offload_param", {"buffer_size": largest})):
        options = zero.get(name, {})
        if options.get("device") == "nvme":
            folder = Path(options["nvme_path"], run, f"rank-{ranks.rank}")
            # Of the run before it was restarted. The run's folder stays: another rank may be making its own in it.
            shutil.rmtree(folder, ignore_errors=True)
            atexit.register(_remove, folder)
            zero[name] = {**default, **options, "nvme_path": str(folder)}
    return {**config, "zero_optimization": zero}


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another rank's is there
        folder.parent.rmdir()


State = dict[str, Any]


@contextmanager
def states_on_nvme(engine: Any) -> Iterator[None]:
    """Makes ``engine.save_checkpoint`` and ``load_checkpoint`` handle states on NVMe, inside the block."""
    optimizer = engine.optimizer
    with (
        replaced(engine, "zero_nvme_offload_optimizer", lambda: False),  # copies of swap files
        replaced(optimizer, "_rigid_state_dict", partial(_state, optimizer, optimizer._rigid_state_dict)),
        replaced(optimizer, "_rigid_load_state_dict", partial(_load, optimizer)),
    ):
        yield


def _state(optimizer: Any, in_memory: Callable[[], State]) -> State:
    """Returns the optimizer's state; tensors on NVMe are read from their files when they are used."""
    state = in_memory()
    if not optimizer.swap_optimizer:
        return state
    flats, entries = list(state["fp32_flat_groups"]), dict(state["optimizer_state_dict"]["state"])
    for number, weights in enumerate(flats):
        swapped = optimizer.optimizer_swapper.swap_params_info.get(weights.ds_id)
        if swapped is None:
            continue
        in_files = {
            id(one.compute_tensor): _file(one.swap_path, swapped.numel(), swapped.dtype()) for one in swapped.tensors
        }
        flats[number] = in_files[id(weights)]
        if number in entries:
            entries[number] = {name: in_files.get(id(value), value) for name, value in entries[number].items()}
    inner = {**state["optimizer_state_dict"], "state": entries}
    return {**state, "fp32_flat_groups": flats, "optimizer_state_dict": inner}


def _file(path: str, count: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=False, size=count, dtype=dtype)


@torch.no_grad()
def _load(optimizer: Any, state: State, load_optimizer_states: bool = True) -> None:  # noqa: ARG001  DeepSpeed's call
    """Loads a state as an optimizer step would update it: a group moves to memory, changes, and moves back."""
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = state["loss_scaler"], state["dynamic_loss_scale"]
    optimizer.overflow = state["overflow"]
    inner, swapper = optimizer.optimizer, optimizer.optimizer_swapper
    optimizer._set_fp32_optimizer_param_groups()
    inner.load_state_dict(state["optimizer_state_dict"])
    optimizer._clear_fp32_optimizer_param_groups()
    # A group moves to memory before it has moments, which then move with it.
    moments, inner.state = inner.state, defaultdict(dict)
    if swapper is not None:
        swapper.purge_state()
    for number, saved in enumerate(state["fp32_flat_groups"]):
        weights, moves = optimizer.fp32_partitioned_groups_flat[number], optimizer._swappable_optimizer_subgroup(number)
        if moves:
            swapper.swap_in_optimizer_state(weights)
        weights.copy_(saved)
        inner.state[weights] = moments[weights]
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if moves:
            swapper.swap_out_optimizer_state(weights)
