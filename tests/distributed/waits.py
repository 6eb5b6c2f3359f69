"""How often a rank waits for its device in one optimizer step.

Reads a case a line, ``[experiment, world size]`` in JSON, and answers each with a line: by name, the operations of the
second step which on a GPU wait for it (``item``, ``tolist``, ``bool``, a mask as an index) or copy a value from the
host (``torch.tensor`` with numbers), by the function of Tridock that calls them; DeepSpeed's and megatron-core's own
are theirs. Ranks of engine ``torch`` are real: its pipelines and DDP want answers.
"""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.forks import answers, cases, in_a_fork
from tests.distributed.pretended import micro_batches, prepare, prepared
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.torch.fsdp import is_sharded
from tridock.experiment import Experiment
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel.mesh import Mesh
from tridock.train.parallel.mesh_strategy import MeshStrategy
from tridock.train.parallel.strategies import DistributedDataParallel, Strategy, Zero
from tridock.train.rank.process_group import Ranks

OWNERS = ("/tridock/train/", "/megatron/", "/deepspeed/")
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh")
READS = ("tolist", "cpu", "numpy")
"""Methods that wait too, and are no operation where the tensor is on the host."""


class Reads(TorchFunctionMode):
    """Calls ``seen`` with the name of each of these methods."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.seen(func.__name__)
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts the calls of the packages named, as a rule of Tridock alone, by the function that makes them."""

    def __init__(self, counted: tuple[str, ...] = OWNERS[:1]) -> None:
        super().__init__()
        self.counted = counted
        self.places: Counter[str] = Counter()
        self.open = True
        """Whether it counts what no operation of a tensor is."""
        self.reads = Reads(self.count)

    def __enter__(self) -> Self:
        self.reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.count(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> None:
        last = [it for it in traceback.extract_stack() if any(one in it.filename for one in OWNERS)][-1]
        if any(one in last.filename for one in self.counted):
            self.places[f"{name} {Path(last.filename).name}:{last.name}"] += 1


def strategy_of(experiment: Experiment, ranks: Ranks) -> tuple[Strategy, list[torch.Tensor]]:
    if experiment.engine == "megatron-core":
        return prepared(experiment, ranks)
    mesh = Mesh.form(experiment.parallel, ranks) if is_sharded(experiment) else None
    replicas = ranks.world_size if mesh is None else mesh.replicas
    experiment = experiment.resolved(replicas)
    with torch.device("meta"):
        model = GPT(Shape.of(experiment.model, experiment.model.vocab_size or 0))
    batches = micro_batches(experiment, replicas)
    if mesh is not None:
        return MeshStrategy(model, experiment, ranks, mesh), batches
    if experiment.parallel.strategy == "ddp":
        return DistributedDataParallel(model, experiment, ranks), batches
    return Zero(model, experiment, ranks, deepspeed_config(experiment, ranks.world_size)), batches


def count(experiment: Experiment, rank: int, world_size: int, folder: str) -> bytes:
    real = experiment.engine == "torch" and experiment.parallel.strategy != "zero"
    store = dist.FileStore(f"{folder}/store", world_size) if real else FakeStore()
    dist.init_process_group("gloo" if real else "fake", store=store, rank=rank, world_size=world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    strategy, batches = strategy_of(experiment, Ranks(rank, rank, world_size, torch.device("cpu")))
    strategy.step(batches, lr=1e-3)
    with Waits() as waits:
        strategy.step(batches, lr=1e-3)
    return json.dumps(waits.places).encode()


def outcome(experiment: Experiment, world_size: int) -> str:
    """The answer of the last rank; the others run beside it."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        work = [partial(count, experiment, rank, world_size, folder) for rank in range(world_size)]
        said, found = list(pool.map(in_a_fork, work))[-1]
    return found.decode() if found else json.dumps(said)


def main() -> None:
    file, ready = answers(), False
    for experiment, world_size in cases():
        if not ready:
            prepare(experiment.engine)
            ready = True
        print(outcome(experiment, world_size), file=file, flush=True)


if __name__ == "__main__":
    main()
