"""Every strategy of engine torch on a pretended GPU: built, stepped, saved, loaded, stepped again.

Checked are the devices of all states, and that no step waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.unit.train.experiments import experiment
from tests.unit.train.pretended_gpu import GPU, REASON, LiveBytes, Transfers, pretended_gpu
from tridock.engines import cost_model_of
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.progress import Progress
from tridock.engines.torch.fsdp import is_sharded
from tridock.experiment import Experiment
from tridock.layout.shape import LayoutShape
from tridock.train import trainer as trainer_module
from tridock.train.checkpoints.snapshot import tensor_on_host
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel import mesh_strategy, strategies
from tridock.train.parallel.mesh import Mesh
from tridock.train.parallel.strategies import DTYPES, Strategy
from tridock.train.rank import signals
from tridock.train.rank.process_group import Ranks
from tridock.train.trainer import Parts, Trainer

pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
]

PIPELINE = {"parallel.strategy": "ddp", "parallel.pipeline_model_parallel_size": 2}
TENSOR = {"parallel.strategy": "ddp", "parallel.tensor_model_parallel_size": 2}


@dataclass(frozen=True)
class Case:
    fields: dict[str, Any]
    world_size: int = 1
    rank: int = 0

    @property
    def experiment(self) -> Experiment:
        """Two micro-batches a replica, and no more layers than stages."""
        parts = [self.fields.get(f"parallel.{name}_model_parallel_size", 1) for name in ("pipeline", "tensor")]
        batch = {"batch.global_batch_size": 4 * self.world_size // (parts[0] * parts[1])}
        return experiment(**{"precision": "bf16", "model.num_layers": parts[0]} | batch | self.fields)


CASES = {
    "ddp alone": Case({"parallel.strategy": "ddp"}),
    "ddp": Case({"parallel.strategy": "ddp"}, 2),
    "ddp, fp16": Case({"parallel.strategy": "ddp", "precision": "fp16"}, 2),
    "fsdp alone": Case({"parallel.strategy": "fsdp"}),
    "fsdp": Case({"parallel.strategy": "fsdp"}, 2, 1),
    "fsdp, fp16": Case({"parallel.strategy": "fsdp", "precision": "fp16"}, 2),
    "hybrid fsdp": Case({"parallel.strategy": "fsdp", "parallel.data_parallel_shard_size": 2}, 4, 3),
    "tensor": Case(TENSOR, 2, 1),
    "tensor, dropout": Case(TENSOR | {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}, 2),
    "tensor, recomputed": Case(TENSOR | {"model.checkpoint_activations": True, "model.attention_dropout": 0.1}, 2),
    "tensor, Llama": Case(
        TENSOR
        | {"model.normalization": "RMSNorm", "model.swiglu": True, "model.position_embedding_type": "rope"}
        | {"model.add_bias_linear": False, "model.untie_embeddings_and_output_weights": True},
        2,
    ),
    "first stage": Case(PIPELINE, 2),
    "last stage": Case(PIPELINE, 2, 1),
    "last stage, gpipe": Case(PIPELINE | {"parallel.pipeline_schedule": "gpipe"}, 2, 1),
    "fsdp, tensor and pipeline": Case(
        PIPELINE | TENSOR | {"parallel.strategy": "fsdp", "precision": "fp16"}, 8, 7
    ),
}  # fmt: skip


@dataclass
class OnGpu:
    """A strategy on a pretended GPU, one to resume with, their ranks, and what they are made for."""

    strategy: Any
    resumed: Any
    ranks: Ranks
    experiment: Experiment

    def batches(self) -> list[Tensor]:
        return [torch.zeros(self.experiment.batch.micro_batch_size, 9, dtype=torch.int64, device=GPU) for _ in range(2)]


@contextmanager
def on_gpu(case: Case) -> Iterator[OnGpu]:
    made = case.experiment
    shape = (made.batch.micro_batch_size, made.model.seq_length, made.model.hidden_size)
    with pretended_gpu(case.world_size, case.rank, shape, DTYPES[made.precision]) as (ranks, fakes):
        mesh = Mesh.form(made.parallel, ranks) if is_sharded(made) else None
        resolved = made.resolved(ranks.world_size if mesh is None else mesh.replicas)

        def make() -> Strategy:
            with fakes:
                if resolved.parallel.strategy == "zero":
                    config = deepspeed_config(resolved, ranks.world_size)
                    return strategies.Zero(model(made), resolved, ranks, config)
                if mesh is None:
                    return strategies.build_strategy(model(made), resolved, ranks, Path())
                return mesh_strategy.MeshStrategy(model(made), resolved, ranks, mesh)

        found = OnGpu(make(), make(), ranks, resolved)
        with fakes, Transfers():  # which answers where a value is read
            yield found


def model(made: Experiment) -> GPT:
    # Real, though without values: a fake tensor cannot change its device.
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("meta"):
        return GPT(Shape.of(made.model, 96))


def needs_pipeline(case: Case) -> None:
    if "parallel.pipeline_model_parallel_size" in case.fields and not hasattr(PipelineStage, "_recv_meta"):
        pytest.skip("this torch's stages exchange their shapes otherwise")


def states(strategy: Any) -> dict[str, Tensor]:
    """The states of every parameter, by the parameter's place and their names."""
    parameters = [one for group in strategy.optimizer.param_groups for one in group["params"]]
    found = strategy.optimizer.state
    return {f"{n} {name}": value for n, one in enumerate(parameters) for name, value in found[one].items()}


def on_host(state: Any) -> Any:
    """As :func:`snapshot.state_on_host`; fake tensors have no storages to share."""

    def one(tensor: Tensor) -> Tensor:
        return tensor_on_host(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    return pytree.tree_map_only(Tensor, one, state)


OF_EVERY_EDIT = ("ddp", "tensor, dropout", "fsdp, tensor and pipeline")


@pytest.mark.parametrize(
    "name", [name if name in OF_EVERY_EDIT else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_a_run_is_saved_and_resumed_without_waiting_for_the_gpu(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    needs_pipeline(case)
    with on_gpu(case) as run:
        strategy = run.strategy
        strategy.step(run.batches(), 0.1)  # a pipeline exchanges shapes in the first step
        batches = run.batches()
        with Transfers() as second:
            step = strategy.step(batches, 0.1)
        assert second.all() == {}
        assert (step.loss.device, step.grad_norm.device) == (GPU, GPU)
        assert {it.device for it in states(strategy).values()} == {GPU}

        written: list[Any] = []
        with (
            mock.patch.object(strategies, "state_on_host", on_host),
            mock.patch.object(mesh_strategy, "state_on_host", on_host),
            mock.patch.object(torch, "save", lambda state, _: written.append(state)),
            mock.patch.object(dcp, "save", lambda state, **_: written.append(state)),
            Transfers() as copies,
        ):
            write = strategy.save(tmp_path, [0] * 8, mock.sentinel.group)
            made = copies.all()
            write()
        saved = pytree.tree_leaves(written)
        assert {it.device.type for it in saved if isinstance(it, Tensor)} == {"cpu"}
        assert copies.all() == made  # written from the copy
        assert made.pop("cuda to cpu, asynchronous") >= len(states(strategy))
        assert made in ({"read": 3}, {})  # fp16's loss scale

        batches = run.batches()
        with Transfers() as third:
            strategy.step(batches, 0.1)
        assert third.all() == {}

        resumed = run.resumed
        with (
            mock.patch.object(torch, "load", return_value=written[0]) as load,
            mock.patch.object(dcp, "load", lambda state, **_: devices.update(state)),
        ):
            devices: dict[str, Tensor] = {}
            resumed.load(tmp_path, case.world_size)
        # The GPU has no room for a second copy of all states.
        assert all(call.kwargs["map_location"] == "cpu" for call in load.mock_calls)
        assert {name for name, it in devices.items() if it.device != GPU} <= {"loss_scaler"}
        kinds = {name: (it.device, it.dtype, it.shape) for name, it in states(strategy).items()}
        assert {name: (it.device, it.dtype, it.shape) for name, it in states(resumed).items()} == kinds
        resumed.step(run.batches(), 0.1)


DEEPSPEEDS_CHECKS = "deepspeed.runtime.zero.{}.assert_ints_same_as_other_ranks"
"""Of the order of parameters: rank 0's order is no value that can be read here."""
PARAMETERS = 16
STEPS = {
    0: {"read": 5 + PARAMETERS, "cpu to cuda": 3},
    1: {"read": 4, "cpu to cuda": 2},
    2: {"read": 4, "cpu to cuda": 2},
    3: {"read": 1, "cpu to cuda": 2},
}
"""How often DeepSpeed 0.19.8 waits for the GPU in a step in bf16. Stage 0 looks at each gradient for infinities."""


@pytest.fixture
def deepspeed_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # stage 3 leaves its own
    monkeypatch.setattr(comm, "cdb", None)
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(real_accelerator, "ds_accelerator", CUDA_Accelerator())
    for module in ("partition_parameters", "partitioned_param_coordinator", "stage3"):
        monkeypatch.setattr(DEEPSPEEDS_CHECKS.format(module), lambda _: None)


@pytest.mark.usefixtures("deepspeed_on_gpus")
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)
def test_zero_is_saved_and_resumed(stage: int, tmp_path: Path) -> None:
    case = Case({"parallel.strategy": "zero", "parallel.zero_stage": stage}, 2)
    files: dict[Path, Any] = {}

    def written(state: Any, file: str, **_: Any) -> None:
        files[Path(file)] = on_host(state)
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()

    with on_gpu(case) as run, Transfers(on_host=1):  # a loss scale of 1
        strategy = run.strategy
        strategy.step(run.batches(), 0.1)
        batches = run.batches()
        with Transfers(on_host=1) as second:
            step = strategy.step(batches, 0.1)
        assert second.all() == STEPS[stage]
        assert step.loss.device == GPU
        before = zero_states(strategy)
        assert {device for device, *_ in before} == {GPU}

        with mock.patch.object(torch, "save", written):
            strategy.save(tmp_path / "iter_0000002", [0] * 8, None)()
        assert {file.name for file in files} == set(strategy.files(0, case.world_size))
        assert {it.device.type for it in pytree.tree_leaves(list(files.values())) if isinstance(it, Tensor)} == {"cpu"}

        with mock.patch.object(torch, "load", lambda file, **_: files[Path(file)]):
            run.resumed.load(tmp_path / "iter_0000002", case.world_size)
        assert zero_states(run.resumed) == before
        run.resumed.step(run.batches(), 0.1)
        assert zero_states(run.resumed) == before


@pytest.mark.usefixtures("deepspeed_on_gpus")
@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        pytest.param(1, ("optimizer",), marks=pytest.mark.full),
        (2, ("optimizer",)),
        pytest.param(3, ("optimizer",), marks=pytest.mark.full),
        pytest.param(3, ("optimizer", "param"), marks=pytest.mark.full),
    ],
)
def test_offloaded_states_are_in_the_hosts_memory(stage: int, parts: tuple[str, ...]) -> None:
    """As many bytes as the plan says, of a model whose largest weight is a small part."""
    zero = {"reduce_bucket_size": 1000} | {f"offload_{part}": {"device": "cpu"} for part in parts}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1000}
    fields = {"parallel.strategy": "zero", "parallel.zero_stage": stage, "deepspeed": {"zero_optimization": zero}}
    size = {"model.num_layers": 4, "model.hidden_size": 128}
    case = Case(fields | size | {"model.vocab_size": 96, "model.make_vocab_size_divisible_by": 96}, 2)
    live = LiveBytes()
    with mock.patch.object(Tensor, "pin_memory", lambda it: it), live, on_gpu(case) as run, Transfers(on_host=1):
        made = dict(live.live)
        run.strategy.step(run.batches(), 0.1)  # DeepSpeed finds an overflow, as a value read on the host is 1
        stepped = dict(live.live)
    costs, shape = cost_model_of(run.experiment), LayoutShape(data=2, accumulation=2, slots=2)
    weights = costs.parameters(run.experiment, 0)
    plan = costs.states(run.experiment, weights, shape, "cuda")
    # Adam's moments come with the first update.
    host = plan.offloaded + plan.host_buffers - 8 * -(-weights.total // 2)
    largest = 2 * 128 * 4 * 128
    assert made["cuda"] / 2 == pytest.approx(plan.weights, abs=2 * largest)
    assert stepped["cpu"] - made["cpu"] / 2 == pytest.approx(host, abs=2 * largest)


def zero_states(strategy: Any) -> list[tuple[Any, ...]]:
    """Device, dtype and shape of every state that DeepSpeed's optimizer steps."""
    wrapped = strategy.engine.optimizer
    found = getattr(wrapped, "optimizer", wrapped).state.values()
    return [(it.device, it.dtype, it.shape) for states in found for it in states.values()]


class Read:
    """A split of zeros."""

    name, per_epoch, vocab_size = "train", 1000, 96

    def batches(self, *_: int) -> Iterator[Any]:
        return (np.zeros((2, 9), np.int64) for _ in range(2))


def test_an_iteration_copies_its_batches_and_one_flag(tmp_path: Path) -> None:
    """The budget of what crosses between host and GPU in an iteration without a log line, checkpoints on."""
    with on_gpu(CASES["ddp"]) as run:

        def build(*_: Any) -> Parts:
            progress = Progress.of(run.experiment, run.ranks.world_size, 96)
            splits: Any = {"train": Read()}
            return Parts(splits, run.strategy, progress, 1, "", 0, 2, lambda _: None)

        with (
            mock.patch.object(trainer_module, "Checkpoints", **{"return_value.set_aside_after.return_value": []}),
            mock.patch.object(Tensor, "pin_memory", lambda it: it),
        ):
            trainer = Trainer(run.experiment, tmp_path, tmp_path, run.ranks, build)
            trainer.experiment = replace_train(trainer.experiment, log_interval=100, train_iters=10, save_interval=5)
            with signals.save_on_signal():
                trainer.iterate(1)
                with Transfers() as transfers:
                    trainer.iterate(2)
        assert transfers.all() == {"cpu to cuda, asynchronous": 2, "cuda to cpu, asynchronous": 1}


def replace_train(made: Experiment, **fields: Any) -> Experiment:
    return made.model_copy(update={"train": made.train.model_copy(update=fields)})
