"""FSDP2, tensor parallelism and pipelines, alone or combined, over a mesh of ranks."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tridock.contracts import heartbeat
from tridock.experiment.schema import Experiment
from tridock.train.checkpoints import sharded
from tridock.train.checkpoints.snapshot import Write, state_on_host
from tridock.train.models.cross_entropy import cross_entropy
from tridock.train.models.gpt import GPT
from tridock.train.models.layered import LayeredModel, fill
from tridock.train.models.resnet import average_statistics, statistics
from tridock.train.parallel.mesh import SHARDS, STAGES, TENSOR, Mesh
from tridock.train.parallel.pipeline import Pipeline, layers_of_stage, stages_of_rank
from tridock.train.parallel.strategies import DTYPES, Batch, Step, at, inputs_and_labels
from tridock.train.parallel.update import LossScaler, clip_and_step
from tridock.train.rank.phases import BACKWARD, FORWARD, OPTIMIZER, SYNC, WAIT, Phases
from tridock.train.rank.process_group import Ranks

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # before torch 2.6; the 2.6.0a0 of base image 24.12 is two months older than 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

_TIED: Final = "token_embedding.weight"


class MeshStrategy:
    """A model sharded over a mesh; weights and optimizer states are fp32.

    In bf16 and fp16 the ranks gather weights in that dtype and reduce gradients in fp32.
    """

    def __init__(self, model: LayeredModel, experiment: Experiment, ranks: Ranks, mesh: Mesh) -> None:
        self.experiment, self.mesh, self.device = experiment, mesh, ranks.device
        self.scaler = LossScaler(experiment.fp16, experiment.precision, ranks.device)
        # Otherwise gradients accumulate unsharded, and the ranks exchange them during the last backward pass.
        self._scatters_each = mesh.size(SHARDS) > 1 and not experiment.parallel.reduce_gradients_once
        self._is_tied = not experiment.model.untie_embeddings_and_output_weights
        self.parts = list(self._parts(model))
        fill(self.parts, model)
        # Collected here, because after an evaluation a module has the gathered weights instead of the shards.
        self.parameters = [named for part in self.parts for named in part.named_parameters()]
        self.phases = Phases(ranks.device)
        self.pipeline: Pipeline | None = None
        if mesh.size(STAGES) > 1:
            steps = experiment.batch.accumulation_steps(mesh.replicas)
            parallel = experiment.parallel
            self.pipeline = Pipeline(
                self.parts, parallel, mesh.stages, self.device, self._scaled_loss, steps, self.phases
            )
        self.optimizer = self._optimizer()

    def _parts(self, model: LayeredModel) -> Iterator[LayeredModel]:
        """Yields this rank's shards of its stages, uninitialized. The model is on the meta device, without storage."""
        parallel, place = self.experiment.parallel, self.mesh.coordinate(STAGES)
        count = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
        for stage in stages_of_rank(parallel, place):
            part: Any = copy.deepcopy(model)
            if count > 1:
                part.keep(layers_of_stage(part.shape.model.num_layers, count, stage))
            if self.mesh.size(TENSOR) > 1:
                split_layers(part, self.mesh.tensor)
            if self.experiment.train.compile:
                part.compile_layers()
            self._shard(part)
            yield part.to_empty(device=self.device)

    def _shard(self, part: LayeredModel) -> None:
        dtype = DTYPES[self.experiment.precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in part.layers.values():
            fully_shard(layer, mesh=self.mesh.data, mp_policy=policy)
        fully_shard(part, mesh=self.mesh.data, mp_policy=policy)

    def _optimizer(self) -> torch.optim.AdamW:
        settings = self.experiment.optimizer
        # The optimizer updates a group in one call, so its weights must be on the same mesh.
        groups: dict[tuple[float, object], list[nn.Parameter]] = defaultdict(list)
        for _, parameter in self.parameters:
            decay = settings.weight_decay if parameter.dim() > 1 else 0.0
            groups[decay, parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
        given: Any = [{"params": members, "weight_decay": decay} for (decay, _), members in groups.items()]
        betas = (settings.adam_beta1, settings.adam_beta2)
        return torch.optim.AdamW(given, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale.item()

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.scaler.scaled(cross_entropy(logits, labels, compiled=self.experiment.train.compile))

    # ---- a step ----

    def step(self, batches: Sequence[Batch], lr: float) -> Step:
        for part in self.parts:
            part.train()
        loss = self._pass(batches) if self.pipeline is None else self._through_stages(batches)
        self._reduce_tied_gradients()
        value = self._from_last_stage(loss) / self.scaler.scale.float()
        with self.phases.inside(OPTIMIZER):
            step = Step(value, self._update(lr))
            self.optimizer.zero_grad()  # now, to free the memory for evaluations and the next forward pass
        return step

    def _through_stages(self, batches: Sequence[Batch]) -> Tensor | None:
        assert self.pipeline is not None
        with self.phases.inside(WAIT):
            return self.pipeline.run(batches, train=True)

    def _pass(self, batches: Sequence[Batch]) -> Tensor:
        model: Any
        (model,) = self.parts
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            model.set_requires_gradient_sync(is_last or self._scatters_each)
            model.set_requires_all_reduce(is_last)
            inputs, labels = inputs_and_labels(batch)
            with self.phases.inside(FORWARD):
                loss = self._scaled_loss(model(inputs), labels)
            with self.phases.inside(BACKWARD):
                (loss / len(batches)).backward()
            total += loss.detach()
        return total / len(batches)

    def _from_last_stage(self, loss: Tensor | None) -> Tensor:
        """Returns the last stage's loss on all stages."""
        value = torch.zeros((), device=self.device) if loss is None else loss.detach().float()
        if self.pipeline is not None:
            group = self.mesh.group(STAGES)
            with self.phases.inside(WAIT):
                dist.broadcast(value, src=dist.get_global_rank(group, dist.get_world_size(group) - 1), group=group)
        return value

    def _reduce_tied_gradients(self) -> None:
        """Sums the gradient of the token embedding over the first and last stage, which share it."""
        if self.pipeline is None or not self._is_tied:
            return
        gradients = [p.grad for name, p in self.parameters if name == _TIED and p.grad is not None]
        with self.phases.inside(SYNC):
            for gradient in gradients:
                dist.all_reduce(_local(gradient), group=self.mesh.ends)

    def _update(self, lr: float) -> Tensor:
        gradients = [(name, p.grad) for name, p in self.parameters if p.grad is not None]
        clip_grad = self.experiment.optimizer.clip_grad
        return clip_and_step(self.optimizer, self._norm(gradients), self.scaler, clip_grad, lr)

    def _norm(self, gradients: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Returns the 2-norm of the whole gradient; each part counts once."""
        kinds: list[list[Tensor]] = [[], [], [], []]
        for name, gradient in gradients:
            if name == _TIED and self.mesh.coordinate(STAGES) > 0:
                continue  # equal to the first stage's
            kinds[2 * _is_split(gradient, TENSOR) + _is_split(gradient, SHARDS)].append(_local(gradient))
        zero = torch.zeros((), device=self.device)
        squares = torch.stack([torch.stack(torch._foreach_norm(it)).square().sum() if it else zero for it in kinds])
        split = squares[1::2].contiguous()
        dist.all_reduce(split, group=self.mesh.group(SHARDS))
        whole, parts = squares[0] + split[0], squares[2] + split[1]
        dist.all_reduce(parts, group=self.mesh.group(TENSOR))
        total = whole + parts
        dist.all_reduce(total, group=self.mesh.group(STAGES))
        return total.double().sqrt()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        if self.pipeline is None and self.parts[0].training:  # once per evaluation, not once per batch
            average_statistics(self.parts[0])
        for part in self.parts:
            part.eval()
        if self.pipeline is not None:
            loss = self.pipeline.run(batches, train=False)
        else:
            (model,) = self.parts
            pairs = map(inputs_and_labels, heartbeat.touching(batches))
            compiled = self.experiment.train.compile
            loss = torch.stack([cross_entropy(model(it), labels, compiled=compiled) for it, labels in pairs]).mean()
        value = self._from_last_stage(loss)
        return value if self.pipeline is None else value / self.scaler.scale.float()

    @torch.no_grad()
    def logits(self, batches: Sequence[Tensor], last: Sequence[Tensor]) -> Tensor | None:
        for part in self.parts:
            part.eval()
        if self.pipeline is None:
            (model,) = self.parts
            found = [_whole_at(model(batch), place) for batch, place in zip(batches, last, strict=True)]
        else:
            found = self.pipeline.outputs(torch.cat(list(batches)), torch.cat(list(last)), _whole_at)
        return torch.cat(found) if found else None

    # ---- checkpoints ----

    def files(self, rank: int, saved: int) -> tuple[str, ...]:  # noqa: ARG002  each rank reads what it needs of all
        return sharded.FILES

    def shard_files(self, folder: Path) -> tuple[str, ...]:
        return sharded.files_of(self._state(), folder)

    def save(self, folder: Path, leaders: Sequence[int], background: dist.ProcessGroup | None) -> Write:
        for part in self.parts:
            average_statistics(part)
        state = self._state()
        if background is not None:
            state = state_on_host(state)
        return partial(sharded.write, state, folder, leaders, background)

    def load(self, folder: Path, saved: int) -> None:  # noqa: ARG002  whoever wrote it
        sharded.load(self.parameters, self._statistics(), self.optimizer, self.scaler, folder)

    def _state(self) -> dict[str, Tensor]:
        return sharded.state_of(self.parameters, self._statistics(), self.optimizer, self.scaler)

    def _statistics(self) -> dict[str, Tensor]:
        """Returns the batch normalization statistics, by their names in the model."""
        return {name: buffer for part in self.parts for name, buffer in statistics(part)}


def _whole_at(logits: Tensor, places: Tensor) -> Tensor:
    """Returns each sample's logits at its place over the whole vocabulary, gathered from tensor parallel ranks:
    [samples, vocabulary]."""
    if not isinstance(logits, DTensor):
        return at(logits, places)
    size = torch.Size((len(places), logits.shape[-1]))
    mesh, own = logits.device_mesh, at(logits.to_local(), places)
    return DTensor.from_local(own, mesh, [Shard(1)], run_check=False, shape=size, stride=(size[1], 1)).full_tensor()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_split(tensor: Tensor, dimension: str) -> bool:
    """Whether the tensor is split along a dimension of the mesh."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    split = (name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())
    return dimension in split


def split_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Splits query groups, MLP and vocabulary over the ranks of ``mesh``, as Megatron does (Shoeybi et al., 2019)."""
    plan = {
        "attention.query_key_value": ColwiseParallel(),
        "attention.dense": RowwiseParallel(),
        "dense_h_to_4h": ColwiseParallel(),
        "dense_4h_to_h": RowwiseParallel(),
    }
    if model.shape.model.swiglu:
        plan["gate"] = ColwiseParallel()
    for layer in model.layers.values():
        attention: Any = layer.attention
        attention.tensor_parallel_rank = mesh.get_local_rank()
        parallelize_module(layer, mesh, plan)
        if attention.has_norms:
            for norm in (attention.query_norm, attention.key_norm):
                _distribute(norm, mesh, Shard(0) if attention.joins_heads else Replicate())
    if hasattr(model, "token_embedding"):
        parallelize_module(model, mesh, {"token_embedding": RowwiseParallel(input_layouts=Replicate())})
    if hasattr(model, "output_layer"):
        parallelize_module(model, mesh, {"output_layer": ColwiseParallel()})


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes a module's weights DTensors; FSDP2 sums the gradients of replicated ones over the ranks of ``mesh``."""
    for name, weight in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [placement])))
