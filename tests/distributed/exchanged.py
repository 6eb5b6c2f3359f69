"""What one rank of an experiment exchanges in one optimizer step.

Reads a case a line, ``[experiment, world size, rank]`` in JSON, and answers each with a line: of each collective or
message ``[group, ranks, operation, bytes]``. Groups have the names of the plan, bytes are those of the whole: what is
reduced, gathered, scattered or sent. Calls are recorded where torch hands them to the backend, below every wrapper and
coalescing manager. The other ranks are pretended (``pretended.py``), but for torch's own data parallelism, which wants
an answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.forks import SLOW
from tests.distributed.pretended import leave, micro_batches, prepared
from tridock.compat import megatron_core
from tridock.engines.deepspeed import deepspeed_config
from tridock.experiment import Experiment
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel.strategies import Strategy, build_strategy
from tridock.train.rank.process_group import Ranks

WHOLE = {  # the place of the tensors that are the whole, among an operation's arguments
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "_allgather_base_": 0,
    "allgather_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "broadcast_": 0,
    "send": 0,
    "recv_": 0,
    "alltoall_base_": 0,
}
IGNORED = {"barrier", "monitored_barrier_"}


Call = tuple[str, int, str, int]


class Recorder(TorchDispatchMode):
    """Notes every operation of torch's distributed package: its group's name and size, its own name, its bytes."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        super().__init__()
        self.name_of = name_of
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (name := func._schema.name.removeprefix("c10d::")) not in IGNORED:
            boxed = next(given for given in args if isinstance(given, torch.ScriptObject))
            group: Any = dist.ProcessGroup.unbox(boxed)
            self.calls.append((self.name_of(group.group_name), group.size(), name, bytes_of(args[WHOLE[name]])))
        return func(*args, **(kwargs or {}))


def bytes_of(given: Any) -> int:
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(bytes_of, given))


def names_of_groups() -> dict[str, str]:
    """The plan's names of megatron-core's groups, by those that torch gave them.

    Of an interleaved pipeline of two stages, one way's messages go through the world's group.
    """
    from megatron.core import parallel_state as state

    groups = {
        "world": dist.group.WORLD,
        "model": state.get_model_parallel_group(),
        "data": state.get_data_parallel_group(with_context_parallel=True),
        "tensor": state.get_tensor_model_parallel_group(),
        "context": state.get_context_parallel_group(),
        "pipeline": state.get_pipeline_model_parallel_group(),
        "embedding": state.get_embedding_group(check_initialized=False),
        "expert": state.get_expert_model_parallel_group(),
        "expert tensor": state.get_expert_tensor_parallel_group(),
        "expert data": state.get_expert_data_parallel_group(),
    }
    return {group.group_name: name for name, group in groups.items() if isinstance(group, dist.ProcessGroup)}


def megatron_core_step(experiment: Experiment, ranks: Ranks) -> list[Call]:
    dist.init_process_group("fake", store=FakeStore(), rank=ranks.rank, world_size=ranks.world_size)
    strategy, batches = prepared(experiment, ranks)
    names = names_of_groups()
    with Recorder(lambda group: names.get(group, "other")) as recorder:
        strategy.step(batches, lr=1e-3)
    leave(experiment.engine)
    return recorder.calls


def torch_step(experiment: Experiment, ranks: Ranks) -> list[Call]:
    """The second: DeepSpeed's ZeRO 3 learns in the first what comes after what."""
    world = ranks.world_size
    with torch.device("meta"):
        model = GPT(Shape.of(experiment.model, experiment.model.vocab_size or 0))
    with tempfile.TemporaryDirectory() as folder:
        config = deepspeed_config(experiment, world)
        if os.environ.get("LET_GO"):  # as with models of more weights than DeepSpeed keeps, or gathers ahead of use
            config["zero_optimization"] |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
        (Path(folder) / "ds_config.json").write_text(json.dumps(config))
        strategy: Strategy = build_strategy(model, experiment, ranks, Path(folder))
    batches = micro_batches(experiment, world)
    strategy.step(batches, lr=1e-3)
    with Recorder(lambda _: "data") as recorder:
        strategy.step(batches, lr=1e-3)
    return recorder.calls


def in_a_process(say: Callable[[], None]) -> int:
    """The id of a child that does so: DeepSpeed keeps much in its modules."""
    if child := os.fork():
        return child
    try:
        say()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def torch_ranks(experiment: Experiment, world: int, asked: int) -> None:
    """Prints what rank ``asked`` exchanges; the others are there for torch's own data parallelism only."""
    real = experiment.parallel.strategy == "ddp"
    with tempfile.TemporaryDirectory() as folder:

        def rank_of(rank: int) -> None:
            store = dist.FileStore(f"{folder}/store", world) if real else FakeStore()
            dist.init_process_group("gloo" if real else "fake", store=store, rank=rank, world_size=world)
            # DeepSpeed wants them, though the group is there.
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
            found = torch_step(experiment, Ranks(rank, rank, world, torch.device("cpu")))
            if rank == asked:
                print(json.dumps(found), flush=True)

        children = [in_a_process(partial(rank_of, rank)) for rank in (range(world) if real else [asked])]
        codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit(f"rank {asked} of {world}: {experiment}")


def main(engine: str) -> None:
    if engine == "megatron-core":
        megatron_core.prepare("cpu", 1)
    else:
        for name in ("deepspeed", *SLOW):
            importlib.import_module(name)
    for case in sys.stdin:
        fields, world, rank = json.loads(case)
        experiment = Experiment.model_validate_json(json.dumps(fields))
        if engine == "megatron-core":
            print(json.dumps(megatron_core_step(experiment, Ranks(rank, rank, world, torch.device("cpu")))), flush=True)
        else:
            torch_ranks(experiment, world, rank)


if __name__ == "__main__":
    main(sys.argv[1])
