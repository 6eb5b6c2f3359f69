"""The same as ``pretended.py`` for Megatron-LM v1.1.5, whose patched source is in the folder given.

Each rank is a fork that runs ``pretrain_gpt2.py`` for one iteration as the engine does, on samples that are all alike.
A pipeline's stages go one after another, forwards only, and each gets the messages that the one before it sent. Where
upstream would continue with another model or batch than it was asked for, it breaks here.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.forks import SLOW, answers, cases, in_a_fork
from tridock import compat
from tridock.compat import megatron_v115
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.megatron_lm.program import megatron_arguments
from tridock.experiment import Experiment
from tridock.layout.split import size_of_replica
from tridock.train.megatron_lm.record import Recorder
from tridock.train.parallel.strategies import import_deepspeed
from tridock.train.rank.process_group import Ranks

TOKENS = [*map(str, range(40)), "<|endoftext|>"]


def join(rank: int, world_size: int) -> Ranks:
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)
    ranks = Ranks(rank, rank, world_size, torch.device("cpu"))
    deepspeed.comm.comm.cdb = None
    import_deepspeed(ranks)
    return ranks


def prepare(source: Path) -> None:
    """What the engine does before it starts Megatron, once for all forks."""
    for name in SLOW:
        importlib.import_module(name)
    join(0, 1)
    compat.install("cpu", 1)
    sys.path.insert(0, str(source))
    megatron_v115.adapt("cpu")
    torch.distributed._backend = "gloo"  # type: ignore[attr-defined]  # as on CPU ranks; here it is "fake"
    dist.destroy_process_group()
    transformer: Any = importlib.import_module("megatron.model.transformer").ParallelTransformer
    transformer._get_layer_index = lambda self, number: range(self.num_layers)[number]


def outcome(source: Path, workspace: Path, experiment: Experiment, world_size: int) -> str:
    """``runs``, or the last line of what a stage says where it gives up."""
    stages = experiment.parallel.pipeline_model_parallel_size
    messages = packed([])
    for stage in range(stages):
        said, messages = in_a_fork(lambda: train(source, workspace, experiment, world_size, stage, messages))  # noqa: B023
        if said != "runs":
            return said
    return "runs"


def packed(messages: list[torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(messages, buffer)
    return buffer.getvalue()


def train(source: Path, workspace: Path, experiment: Experiment, world_size: int, stage: int, messages: bytes) -> bytes:
    """One iteration on the first rank of a stage; takes the messages to the stage, and gives those to the next one."""
    stages = experiment.parallel.pipeline_model_parallel_size
    ranks = join(stage * (world_size // stages), world_size)
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    replicas = world_size // size_of_replica(experiment)
    experiment = experiment.resolved(replicas)
    folder = Path(tempfile.mkdtemp(dir=workspace / "runs"))
    config = deepspeed_config(experiment, replicas)
    (folder / "ds_config.json").write_text(json.dumps(config))
    plan: Any = SimpleNamespace(
        tensor_model_parallel_size=experiment.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=stages,
        micro_batch_size=experiment.batch.micro_batch_size,
        accumulation_steps=config["gradient_accumulation_steps"],
    )
    sys.argv = [str(source / "pretrain_gpt2.py"), *megatron_arguments(experiment, plan, str(folder))]

    from megatron import mpu, training

    mpu.broadcast_data = lambda keys, data, _: {key: data[key] for key in keys}
    training.build_train_valid_test_data_iterators = lambda _: _samples(training.get_args(), experiment)
    sent = _stage_alone(torch.load(io.BytesIO(messages), weights_only=True))
    recorder = Recorder(training, experiment, folder, ranks)
    updates: list[object] = []
    register_optimizer_step_post_hook(lambda *given: updates.append(given))
    runpy.run_path(sys.argv[0], run_name="__main__")
    recorder.metrics.close()
    if experiment.parallel.strategy == "ddp":
        per_update = experiment.batch.micro_batch_size * replicas
        wanted = [experiment.batch.global_batch_size] * (experiment.train.train_iters or 0)
        assert [per_update] * len(updates) == wanted, "updates on less than the batch"
    return packed(sent)


def _samples(args: Any, experiment: Experiment) -> tuple[Iterator[Any], None, None]:
    args.do_train, args.do_valid, args.do_test = True, False, False
    sample = {
        "text": torch.zeros(experiment.batch.micro_batch_size, experiment.model.seq_length + 1, dtype=torch.int64)
    }
    return iter([sample] * 64), None, None


def _stage_alone(messages: list[torch.Tensor]) -> list[torch.Tensor]:
    """Lets DeepSpeed's pipeline do one forward pass only, with the messages that came; gives those that it sends."""
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.pipe.engine import PipelineEngine

    sent: list[torch.Tensor] = []

    def train_batch(self: Any, data_iter: Iterator[Any]) -> torch.Tensor:
        p2p.send = lambda tensor, _: sent.append(tensor.detach().clone())
        p2p.recv = lambda tensor, _: tensor.copy_(messages.pop(0))
        self.set_dataiterator(data_iter)
        self._compute_loss, self.fwd_outputs, self.total_loss = True, [], None
        self._reserve_pipe_buffers(1)
        if self.is_first_stage() or self.is_last_stage():
            self._exec_load_micro_batch(0)
        if not self.is_first_stage():
            self._exec_recv_activations(0)
        self._exec_forward_pass(0)
        if not self.is_last_stage():
            self._exec_send_activations(0)
        return self.loss.detach() if self.is_last_stage() else torch.zeros(())

    PipelineEngine.train_batch = train_batch
    return sent


def write_vocabulary(workspace: Path) -> None:
    (workspace / "runs").mkdir()
    (workspace / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(TOKENS)}))
    (workspace / "merges.txt").write_text("#version: 0.2\n")


def answer_cases(answer: Callable[[Path, Path, Experiment, int], Any]) -> None:
    """Prints what ``answer`` returns for the source, a workspace and each case, as JSON."""
    source, file = Path(sys.argv[1]), answers()
    prepare(source)
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        write_vocabulary(workspace)
        for experiment, world_size in cases():
            print(json.dumps(answer(source, workspace, experiment, world_size)), file=file, flush=True)


if __name__ == "__main__":
    answer_cases(outcome)
