"""Loads ZeRO's optimizer states on another number of ranks than the one that saved them.

DeepSpeed refuses such a checkpoint. ZeRO-1 and 2 store each parameter group as one flat vector, split into equal
partitions, the last padded with zeros. ZeRO-3 splits each parameter in this way, and a rank holds one partition of
each. Here a rank reads its new partitions from the old ones; files are memory-mapped, not read whole.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tridock.train.checkpoints.write_errors import replaced

State = dict[str, Any]


def gather_slice(partitions: Sequence[Tensor], first: int, count: int) -> Tensor:
    """Returns elements ``first`` to ``first + count`` of the concatenated ``partitions``, with zeros beyond the end."""
    out = torch.zeros(count, dtype=partitions[0].dtype)
    begin = 0
    for one in partitions:
        low, high = max(first, begin), min(first + count, begin + one.numel())
        if low < high:
            out[low - first : high - first] = one[low - begin : high - begin]
        begin += one.numel()
    return out


def parameter_partitions(
    flats: Sequence[Sequence[Tensor]], sizes: Sequence[int], rank: int, ranks: int
) -> list[Tensor]:
    """Returns this rank's padded ZeRO-3 partition of each parameter, from the flat vectors of the ranks that saved.

    ``flats`` has the vectors of each of those ranks, which concatenate the padded partitions of all parameters;
    ``sizes`` has the number of elements of each parameter.
    """
    out, offset = [], 0
    for size in sizes:
        before, now = -(-size // len(flats)), -(-size // ranks)
        out.append(gather_slice([gather_slice(flat, offset, before) for flat in flats], rank * now, now))
        offset += before
    return out


@contextmanager
def resharded(engine: Any, folder: Path, files: Callable[[int], Sequence[str]], saved: int) -> Iterator[None]:
    """Makes ``engine.load_checkpoint`` accept a checkpoint of ``saved`` ranks inside the block.

    ``files`` returns the files that a given one of those ranks wrote, the optimizer states last.
    """
    stage, rank = engine.zero_optimization_stage(), dist.get_rank()
    name = engine._get_ckpt_name

    def load(*_: object, **__: object) -> bool:
        states = [
            torch.load(folder / files(number)[-1], map_location="cpu", mmap=True, weights_only=True)[
                "optimizer_state_dict"
            ]
            for number in range(saved)
        ]
        own = (_stage_3 if stage == 3 else _stages_1_and_2)(engine.optimizer, states)
        engine.optimizer.load_state_dict(
            [own] * dist.get_world_size(),
            load_optimizer_states=True,
            load_from_fp32_weights=engine.zero_load_from_fp32_weights(),
            param_shapes=engine._get_zero_param_shapes(),
        )
        return True

    def model_file(
        load_dir: str, tag: str, mp_placeholder: str | None = None, pp_placeholder: str | None = None
    ) -> str:
        # ZeRO-3 has a model file per rank; they differ only in the partitions, which come from the optimizer states.
        return str(name(load_dir, tag, mp_placeholder, pp_placeholder or str(rank % saved)))

    with replaced(engine, "_load_zero_checkpoint", load), replaced(engine, "_get_ckpt_name", model_file):
        yield


def _stages_1_and_2(optimizer: Any, states: Sequence[State]) -> State:
    """Returns this rank's optimizer state from ``states``, those of all ranks that saved."""
    weights, inner = "single_partition_of_fp32_groups", "base_optimizer_state"
    counts = [vector.numel() for vector in optimizer.single_partition_of_fp32_groups]

    def ours(group: int, partitions: Sequence[Tensor]) -> Tensor:
        return gather_slice(partitions, dist.get_rank() * counts[group], counts[group])

    moved: dict[int, State] = {}
    for group, entry in states[0][inner]["state"].items():
        of_group = [state[inner]["state"][group] for state in states]
        moved[group] = {**entry, **{key: ours(group, [one[key] for one in of_group]) for key in _vectors(entry)}}
    return {
        **states[0],
        inner: {**states[0][inner], "state": moved},
        weights: [ours(group, [state[weights][group] for state in states]) for group in range(len(counts))],
    }


def _vectors(entry: Mapping[str, Any]) -> list[str]:
    """Returns the names of the optimizer states that have a value per element."""
    return [key for key, value in entry.items() if torch.is_tensor(value) and value.dim()]


def _stage_3(optimizer: Any, states: Sequence[State]) -> State:
    """Returns this rank's ZeRO-3 state. Joins the parts of long groups first, which DeepSpeed splits by the ranks."""
    groups = [[int(parameter.ds_numel) for parameter in group] for group in optimizer.fp16_groups]
    sizes = [size for group in groups for size in group]
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def ours(pick: Callable[[State], Sequence[Tensor]]) -> list[Tensor]:
        flats = [pick(state) for state in states]
        partitions = iter(parameter_partitions(flats, sizes, rank, ranks))
        return [torch.cat([next(partitions) for _ in group]) for group in groups]

    inner = "optimizer_state_dict"
    entry: State = states[0][inner]["state"][0]
    first = {key: value for key, value in entry.items() if key not in _vectors(entry)}

    def vector(key: str) -> list[Tensor]:
        return ours(lambda s: [one[key] for one in s[inner]["state"].values()])

    vectors = {key: vector(key) for key in _vectors(entry)}
    entries = {
        # Each gets its own step counter, because the optimizer increments it in place.
        number: {**copy.deepcopy(first), **{key: of_groups[number] for key, of_groups in vectors.items()}}
        for number in range(len(groups))
    }
    optimizer._set_fp32_optimizer_param_groups()
    now = optimizer.optimizer.state_dict()["param_groups"]
    optimizer._clear_fp32_optimizer_param_groups()
    settings = [
        {**was, "params": own["params"]} for was, own in zip(states[0][inner]["param_groups"], now, strict=True)
    ]
    return {
        **states[0],
        inner: {"state": entries, "param_groups": settings},
        "fp32_flat_groups": ours(lambda s: s["fp32_flat_groups"]),
    }
