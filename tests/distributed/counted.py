"""How many weights the engines' own models have, on ranks of worlds that are only pretended (``pretended.py``).

Reads a case a line, ``[experiment, world size, rank, argv]`` in JSON, and answers each with the number of this rank's
weights. argv is Megatron's command line, for engine ``megatron-deepspeed``, whose source TRIDOCK_MEGATRON names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.pretended import leave, prepared
from tridock.experiment import Experiment
from tridock.train.rank.process_group import Ranks


def count(*models: nn.Module) -> int:
    return sum(weight.numel() for model in models for weight in model.parameters())


def megatron_core(experiment: Experiment, ranks: Ranks) -> int:
    strategy, _ = prepared(experiment, ranks)
    weights = count(*strategy.chunks)
    leave(experiment.engine)
    return weights


def prepare_v115() -> None:
    """What its rank program does, before it joins a world."""
    import deepspeed.ops

    from tridock import compat

    deepspeed.ops.__compatible_ops__ = {}
    compat.install("cpu", 1)
    sys.path.insert(0, os.environ["TRIDOCK_MEGATRON"])


def model_of_v115(place: Ranks, arguments: list[str]) -> nn.Module:
    """Once in a process: Megatron keeps its arguments and groups in its modules."""
    import deepspeed

    from tridock.compat import megatron_v115

    dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=place.world_size)
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    megatron_v115.adapt("cpu")
    pretrain: Any = importlib.import_module("pretrain_gpt2")
    sys.argv = ["pretrain_gpt2.py", *arguments]
    importlib.import_module("megatron.initialize").initialize_megatron(
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"}, allow_no_cuda=True
    )
    model: nn.Module = pretrain.model_provider()
    return model


def in_a_process(place: Ranks, arguments: list[str], answers: int) -> None:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(f"rank {place.rank}: {arguments}")
        return
    try:
        os.environ.update(RANK=str(place.rank), LOCAL_RANK="0", WORLD_SIZE=str(place.world_size))
        os.write(answers, f"{count(model_of_v115(place, arguments))}\n".encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(engine: str) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # Megatron prints much
    if engine == "megatron-core":
        from tridock.compat import megatron_core as compat

        compat.prepare("cpu", 1)
    else:
        prepare_v115()
    for line in sys.stdin:
        fields, world, rank, argv = json.loads(line)
        place = Ranks(rank, 0, world, torch.device("cpu"))
        if engine == "megatron-core":
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            weights = megatron_core(Experiment.model_validate_json(json.dumps(fields)), place)
            os.write(answers, f"{weights}\n".encode())
        else:
            in_a_process(place, argv, answers)


if __name__ == "__main__":
    main(sys.argv[1])
