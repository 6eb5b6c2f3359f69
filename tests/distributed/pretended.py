"""Ranks of worlds that are only pretended: what engines ``torch`` and ``megatron-core`` make of an experiment on them.

Reads a case a line, ``[experiment, world size]`` in JSON, all of one engine, and answers each with a line: ``"runs"``,
or what the engine said where it gave up. The first and the last rank do all that the engine does in an optimizer step,
but nobody answers them: torch's fake process group leaves what they should receive as it is. So whatever a rank refuses
by itself is found, in the middle of a step too, and hundreds of layouts take a minute.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.forks import SLOW, answers, attempt, cases, in_a_fork
from tridock.compat import megatron_core
from tridock.engines.deepspeed import deepspeed_config
from tridock.experiment import Experiment
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel.strategies import DistributedDataParallel, Strategy, Zero
from tridock.train.rank.process_group import Ranks
from tridock.train.trainer import check_batch

if TYPE_CHECKING:
    from tridock.train.megatron_core.strategy import MegatronCore


def prepare(engine: str) -> None:
    """Brings in what the ranks need, once for all of them."""
    if engine == "megatron-core":
        megatron_core.prepare("cpu", 1)
        answer_counts()
    else:
        for name in SLOW:
            importlib.import_module(name)


def answer_counts() -> None:
    """Every rank sends as many tokens to each expert as this one: how many come decides what a rank allocates."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    gather = dispatcher.gather_from_sequence_parallel_region

    def gathered(mine: torch.Tensor, *given: Any, group: Any, **named: Any) -> torch.Tensor:
        if mine.dtype == torch.int64:
            return mine.repeat(group.size())
        return gather(mine, *given, group=group, **named)  # type: ignore[no-any-return]

    dispatcher.gather_from_sequence_parallel_region = gathered
    exchange = dist.all_to_all_single

    def exchanged(output: torch.Tensor, mine: torch.Tensor, *given: Any, **named: Any) -> Any:
        # torch's fake group refuses what Gloo and NCCL do: a rank whose experts nobody wants sends nothing.
        return exchange(output, mine, *given, **named) if mine.numel() else None

    dist.all_to_all_single = exchanged


def outcome(experiment: Experiment, world_size: int) -> str:
    """``runs``, or the first line of the refusal."""
    # megatron-core's groups can be given up, and a fork would import its optimizers again; DeepSpeed's cannot.
    kind = attempt if experiment.engine == "megatron-core" else in_a_fork
    for rank in sorted({0, world_size - 1}):
        said, _ = kind(lambda: step(experiment, rank, world_size))  # noqa: B023  it runs at once
        if said != "runs":
            return said
    return "runs"


def step(experiment: Experiment, rank: int, world_size: int) -> bytes:
    # torch's DDP wants results of its collectives, and has them where it is alone.
    backend, store = ("gloo", dist.HashStore()) if world_size == 1 else ("fake", FakeStore())
    dist.init_process_group(backend=backend, store=store, rank=rank, world_size=world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    ranks = Ranks(rank, rank, world_size, torch.device("cpu"))
    try:
        (step_of_core if experiment.engine == "megatron-core" else step_of_torch)(experiment, ranks)
    finally:
        leave(experiment.engine)
    return b""


def leave(engine: str) -> None:
    """Gives up the world, for the next."""
    if engine == "megatron-core":
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
    dist.destroy_process_group()


def step_of_core(experiment: Experiment, ranks: Ranks) -> None:
    """What ``megatron_core_parts`` does on this rank, without data, and one step of the training loop."""
    strategy, batches = prepared(experiment, ranks)
    strategy.step(batches, lr=1e-3)


def prepared(experiment: Experiment, ranks: Ranks) -> tuple[MegatronCore, list[torch.Tensor]]:
    """This rank's part of megatron-core's model, and the micro batches of a step."""
    from tridock.engines import rules_of
    from tridock.train.megatron_core.layout import Layout
    from tridock.train.megatron_core.strategy import MegatronCore

    layout = Layout.form(experiment.parallel)
    layout.reseed(experiment.train.seed, 0)
    experiment = experiment.resolved(layout.data_parallel_size)
    check_batch(experiment, layout.data_parallel_size)
    tokens = experiment.model.vocab_size
    rows = rules_of(experiment).padded_vocab_size(tokens, experiment)
    strategy = MegatronCore(experiment, tokens, rows, layout, ranks)
    return strategy, micro_batches(experiment, layout.data_parallel_size)


def step_of_torch(experiment: Experiment, ranks: Ranks) -> None:
    """The same for ``torch_parts``."""
    experiment = experiment.resolved(ranks.world_size)
    check_batch(experiment, ranks.world_size)
    with torch.device("meta"):
        model = GPT(Shape.of(experiment.model, experiment.model.vocab_size))
    if experiment.parallel.strategy == "ddp":
        train(DistributedDataParallel(model, experiment, ranks), experiment, ranks.world_size)
    else:
        config = deepspeed_config(experiment, ranks.world_size)
        train(Zero(model, experiment, ranks, config), experiment, ranks.world_size)


def train(strategy: Strategy, experiment: Experiment, replicas: int) -> None:
    strategy.step(micro_batches(experiment, replicas), lr=1e-3)


def micro_batches(experiment: Experiment, replicas: int) -> list[torch.Tensor]:
    """Of a step on one replica."""
    micro = experiment.batch.micro_batch_size
    batch = torch.zeros(micro, experiment.model.seq_length + 1, dtype=torch.int64)
    return [batch] * (experiment.batch.samples_per_step(replicas) // (micro * replicas))


def main() -> None:
    file, prepared = answers(), False
    for experiment, world_size in cases():
        if not prepared:
            prepare(experiment.engine)
            prepared = True
        print(json.dumps(outcome(experiment, world_size)), file=file, flush=True)


if __name__ == "__main__":
    main()
