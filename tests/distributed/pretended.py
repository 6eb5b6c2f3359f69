"""Ranks of worlds that are only pretended: what becomes of an experiment of engine ``megatron-core`` on one of them.

Reads a case a line, ``[experiment, world size, rank]`` in JSON, and answers each with a line: ``"runs"``, or what the
engine said where it gave up. A rank does all that the engine does in an optimizer step, but nobody answers it: torch's
fake process group leaves what it should receive as it is. So whatever one rank refuses is found, in the middle of a
step too, and hundreds of layouts take a minute in one process.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tridock.compat import megatron_core
from tridock.experiment import Experiment
from tridock.train.process_group import Ranks
from tridock.train.trainer import check_batch

if TYPE_CHECKING:
    from tridock.train.megatron_core.strategy import MegatronCore


def outcome(experiment: Experiment, world_size: int, rank: int) -> str:
    """``runs``, or the first line of the refusal."""
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        step(experiment, Ranks(rank, rank, world_size, torch.device("cpu")))
    except Exception as error:  # whatever stops the engine stops the run
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        leave()
    return "runs"


def leave() -> None:
    """Forgets the world, for the next."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def step(experiment: Experiment, ranks: Ranks) -> None:
    """What ``megatron_core_parts`` does on this rank, without data, and one step of the training loop."""
    strategy, batches = prepared(experiment, ranks)
    strategy.step(batches, lr=1e-3)


def prepared(experiment: Experiment, ranks: Ranks) -> tuple[MegatronCore, list[torch.Tensor]]:
    """This rank's part of the model, and the micro batches of a step."""
    from tridock.train.megatron_core.layout import Layout
    from tridock.train.megatron_core.parts import padded_vocab_size
    from tridock.train.megatron_core.strategy import MegatronCore

    layout = Layout.form(experiment.parallel)
    layout.reseed(experiment.train.seed, 0)
    replicas = layout.data_parallel_size
    experiment = experiment.resolved(replicas)
    check_batch(experiment, replicas)
    tokens = experiment.model.vocab_size
    strategy = MegatronCore(experiment, tokens, padded_vocab_size(tokens, experiment), layout, ranks)
    micro = experiment.batch.micro_batch_size
    batch = torch.zeros(micro, experiment.model.seq_length + 1, dtype=torch.int64)
    return strategy, [batch] * (experiment.batch.samples_per_step(replicas) // (micro * replicas))


def main() -> None:
    megatron_core.prepare("cpu", 1)
    for line in sys.stdin:
        fields, world_size, rank = json.loads(line)
        print(json.dumps(outcome(Experiment.model_validate_json(json.dumps(fields)), world_size, rank)), flush=True)


if __name__ == "__main__":
    main()
