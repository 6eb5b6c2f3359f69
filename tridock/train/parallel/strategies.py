"""The strategies of engine ``torch`` on whole models: torch's DDP and DeepSpeed's ZeRO, behind one protocol."""

import copy
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tridock.contracts import environment, heartbeat
from tridock.contracts.checkpoints import zero_file
from tridock.contracts.run_folder import DEEPSPEED_CONFIG
from tridock.engines.offload import Offload
from tridock.errors import Problem, RequestError
from tridock.experiment.schema import Experiment
from tridock.train.checkpoints.adam_state import keeping_settings
from tridock.train.checkpoints.pickles import only_weights, safe_torch_load
from tridock.train.checkpoints.snapshot import Write, state_on_host, write_by_torch_save
from tridock.train.checkpoints.zero_reshard import resharded
from tridock.train.models.gpt import parameter_groups
from tridock.train.models.layered import LayeredModel, draw_weights, fill
from tridock.train.models.resnet import average_statistics
from tridock.train.parallel.nvme import config_of_rank, states_on_nvme
from tridock.train.parallel.update import LossScaler, clip_and_step
from tridock.train.rank.phases import BACKWARD, FORWARD, OPTIMIZER, SYNC, Phases
from tridock.train.rank.process_group import Ranks

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a step, on the rank's device."""

    loss: Tensor
    """Mean loss of this rank's micro-batches, a scalar."""
    grad_norm: Tensor | float
    """2-norm of the whole gradient, the mean over all replicas, before clipping. If not finite: infinite if the step
    was skipped, as in fp16, and NaN if it was taken."""


def norm_of_taken_step(norm: Tensor | float) -> Tensor | float:
    """Returns the gradient norm of a step that was taken: NaN unless finite. DeepSpeed's is then -1."""
    if isinstance(norm, Tensor):
        return norm.masked_fill(~norm.isfinite() | (norm < 0), math.nan)
    return norm if math.isfinite(norm) and norm >= 0 else math.nan


Batch = Tensor | tuple[Tensor, Tensor]
"""Tokens, int64 [micro batch, seq_length + 1]; or images and labels, uint8 [micro batch, 3, height, width] and int64
[micro batch]. On the rank's device."""


def inputs_and_labels(batch: Batch) -> tuple[Tensor, Tensor]:
    """Splits a batch: tokens into inputs and next tokens, [micro batch, seq_length] each."""
    return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])


class Strategy(Protocol):
    """How ranks share a model, its optimizer and its batches."""

    @property
    def phases(self) -> Phases:
        """The times of its steps by phase."""

    @property
    def loss_scale(self) -> float:
        """The loss scale in fp16; 1 otherwise."""

    def step(self, batches: Sequence[Batch], lr: float) -> Step:
        """Runs forward and backward over the micro-batches, and one optimizer update with learning rate ``lr``."""

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Returns the mean loss of the micro-batches, an fp32 scalar, without dropout or gradients."""

    def logits(self, batches: Sequence[Tensor], last: Sequence[Tensor]) -> Tensor | None:
        """Returns the logits after the token at ``last`` [micro batch] of each sample: [samples, vocabulary].

        ``batches`` are int64 [micro batch, seq_length]. If another rank has a sample's logits, they are NaN here; if
        other ranks have all, it returns None. A collective.
        """

    def files(self, rank: int, saved: int) -> tuple[str, ...]:
        """Returns the names of the files that a rank reads from a checkpoint written by ``saved`` ranks."""

    def shard_files(self, folder: Path) -> tuple[str, ...]:
        """Returns the names of the shards that this rank reads, by the index that :meth:`files` names."""

    def save(self, folder: Path, leaders: Sequence[int], background: dist.ProcessGroup | None) -> Write:
        """Returns the collective that writes this rank's part. The rank that leads its file system, of ``leaders`` by
        rank, also writes the files common to all ranks.

        With a process group ``background``, it may run on another thread while training continues: it writes a copy of
        the state, made here, and communicates in that group. A collective.
        """

    def load(self, folder: Path, saved: int) -> None:
        """Loads the state that ``save`` wrote on ``saved`` ranks. A collective."""


def build_strategy(model: LayeredModel, experiment: Experiment, ranks: Ranks, run_folder: Path) -> Strategy:
    """Builds the experiment's strategy; ``model`` is on the meta device, and its weights are not yet drawn."""
    if experiment.parallel.strategy == "ddp":
        return DistributedDataParallel(model, experiment, ranks)
    return Zero(model, experiment, ranks, _read_deepspeed_config(run_folder, ranks.world_size), run_folder.name)


def _adamw(model: nn.Module, experiment: Experiment) -> torch.optim.AdamW:
    settings = experiment.optimizer
    groups: Any = parameter_groups(model, settings.weight_decay)
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)


def _ddp(module: nn.Module, ranks: Ranks) -> nn.parallel.DistributedDataParallel:
    """Wraps the module in torch's DDP. Used only with several ranks, because its buckets cost time in each step."""
    devices = [ranks.device.index] if ranks.device.type == "cuda" else None
    with warnings.catch_warnings():
        # torch 2.13 has two newer options for this, which older versions lack.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return nn.parallel.DistributedDataParallel(
            module, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
        )


class DistributedDataParallel:
    """torch DDP. Weights, gradients and optimizer states are fp32 on every rank.

    bf16 and fp16 use autocast, which runs matrix products in that dtype and keeps the rest in fp32.
    Only fp16 needs a loss scale: bf16 has the exponent range of fp32.
    """

    def __init__(self, model: LayeredModel, experiment: Experiment, ranks: Ranks) -> None:
        self.experiment = experiment
        self.device = ranks.device
        self.module = model.to_empty(device=ranks.device)
        fill([model], model)
        self.model = self.module if ranks.world_size == 1 else _ddp(self.module, ranks)
        self._keeps_gradients = ranks.world_size > 1  # in DDP's buckets
        self._knows_order = ranks.world_size == 1
        self.optimizer = _adamw(self.module, experiment)
        self.scaler = LossScaler(experiment.fp16, experiment.precision, ranks.device)
        self.phases = Phases(ranks.device)
        if ranks.world_size > 1:
            first = [it.weight for it in model.modules() if isinstance(it, nn.Embedding)]
            self.phases.sync_follows(first or [next(model.parameters())])

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale.item()

    def _forward(self, model: nn.Module, *given: Tensor) -> Tensor:
        short = self.experiment.precision != "fp32"
        with torch.autocast(self.device.type, DTYPES[self.experiment.precision]) if short else nullcontext():
            found: Tensor = model(*given)
        return found

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._forward(model, *inputs_and_labels(batch))

    def _learn_order(self, batch: Batch) -> None:
        """Runs a backward pass whose gradients nobody uses.

        After its first one, DDP puts gradients into other buckets, in the order in which they come. A sum over ranks is
        rounded otherwise in another place of a bucket: a resumed run's first step would differ from an uninterrupted
        run's in the last bit.
        """
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            with self.phases.inside(FORWARD):
                loss = self._loss(self.model, batch)
            with self.phases.inside(BACKWARD):
                loss.backward()
        self.optimizer.zero_grad()
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        self._knows_order = True

    def step(self, batches: Sequence[Batch], lr: float) -> Step:
        self.model.train()
        if not self._knows_order:
            self._learn_order(batches[0])
        if self._keeps_gradients and len(batches) > 1:
            self.optimizer.zero_grad(set_to_none=False)  # they are views of DDP's buckets, where they accumulate
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, start=1):
            # Ranks exchange gradients once a step, during the last backward pass.
            with self._no_sync() if number < len(batches) else nullcontext():
                with self.phases.inside(FORWARD):
                    loss = self._loss(self.model, batch)
                with self.phases.inside(BACKWARD):
                    self.scaler.scaled(loss, len(batches)).backward()
            total += loss.detach()
        with self.phases.inside(OPTIMIZER):
            step = Step(total / len(batches), self._update(lr))
            if not self._keeps_gradients or len(batches) == 1:
                self.optimizer.zero_grad()  # the next backward pass writes them, instead of adding to zeros
        return step

    def _no_sync(self) -> AbstractContextManager[None]:
        ddp = self.model if isinstance(self.model, nn.parallel.DistributedDataParallel) else None
        return nullcontext() if ddp is None else ddp.no_sync()

    def _update(self, lr: float) -> Tensor:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        clip_grad = self.experiment.optimizer.clip_grad
        return clip_and_step(self.optimizer, norm_of(gradients), self.scaler, clip_grad, lr)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        if self.model.training:
            average_statistics(self.module)
            self.model.eval()
        # Not through DDP: an evaluation needs no communication.
        return _mean([self._loss(self.module, batch) for batch in heartbeat.touching(batches)])

    @torch.no_grad()
    def logits(self, batches: Sequence[Tensor], last: Sequence[Tensor]) -> Tensor:
        self.model.eval()
        return torch.cat([at(self._forward(self.module, *it), place) for *it, place in zip(batches, last, strict=True)])

    def files(self, rank: int, saved: int) -> tuple[str, ...]:  # noqa: ARG002  one file holds all
        return ("ddp.pt",)

    def shard_files(self, folder: Path) -> tuple[str, ...]:  # noqa: ARG002  one file holds all
        return ()

    def save(self, folder: Path, leaders: Sequence[int], background: dist.ProcessGroup | None) -> Write:
        average_statistics(self.module)
        if dist.get_rank() not in leaders:
            return lambda: None
        state = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_scaler": self.scaler.state(),
        }
        return partial(torch.save, state if background is None else state_on_host(state), folder / "ddp.pt")

    def load(self, folder: Path, saved: int) -> None:  # noqa: ARG002  all ranks have the same
        # A GPU gets one tensor at a time: it has no room for a second copy of all states.
        on_gpu = self.device.type == "cuda"
        with only_weights():
            state = torch.load(folder / "ddp.pt", map_location="cpu", mmap=on_gpu, weights_only=True)
        self.module.load_state_dict(state["model"])
        with keeping_settings(self.optimizer):
            self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.restore(state["loss_scaler"])


class Zero:
    """DeepSpeed's engine with ZeRO stages 0 to 3, configured by the run's ``ds_config.json``.

    In bf16 and fp16 the model itself has that dtype; the optimizer holds fp32 master weights.
    """

    def __init__(
        self, model: LayeredModel, experiment: Experiment, ranks: Ranks, config: dict[str, Any], run: str = ""
    ) -> None:
        deepspeed = import_deepspeed(ranks)
        self.stage, self.world_size = experiment.parallel.zero_stage, ranks.world_size
        self.precision = experiment.precision
        # DeepSpeed's scaler at stage 0 has no hysteresis and does not scale the loss (0.19.8), so this uses Tridock's.
        own = self.stage == 0
        # On the host, because DeepSpeed needs a Python number.
        self.scaler = LossScaler(experiment.fp16, experiment.precision, torch.device("cpu")) if own else None
        if self.scaler is not None and experiment.precision == "fp16":
            config = {**config, "fp16": {**config["fp16"], "loss_scale": self.scaler.scale.item()}}
        model.to(DTYPES[experiment.precision])
        self.on_nvme = Offload.of(experiment).on_nvme
        if self.on_nvme:
            config = config_of_rank(config, model, run, ranks)
        if self.stage == 3:
            _partition(model, partial(deepspeed.zero.Init, config_dict_or_path=config), ranks.device)
        else:
            model.to_empty(device=ranks.device)
            fill([model], model)
        optimizer = _adamw(model, experiment)
        _set_lr(optimizer, 0.0)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        if self.stage == 0:
            # In bf16 and fp16 DeepSpeed creates Adam's states by a step on zero gradients (at lr 0, so the weights
            # stay) and counts it: every bias correction would be one step off.
            optimizer.state.clear()
        self.phases = Phases(ranks.device)
        # Stages 2 and 3 exchange most of them earlier, in the backward pass.
        self.engine.allreduce_gradients = self.phases.around(SYNC, self.engine.allreduce_gradients)

    @property
    def loss_scale(self) -> float:
        if self.precision != "fp16":
            return 1.0
        if self.scaler is not None:
            return self.scaler.scale.item()
        return float(self.engine.optimizer.loss_scaler.cur_scale)

    def step(self, batches: Sequence[Batch], lr: float) -> Step:
        self.engine.train()
        _set_lr(self.engine.optimizer, lr)
        scale = self.scaler.scale.item() if self.scaler is not None else 1.0
        if self.scaler is not None and self.precision == "fp16":
            self.engine.optimizer.loss_scale_config.cur_scale = scale
        total, bare_norm = torch.zeros((), device=self.engine.device), None
        for number, batch in enumerate(batches, start=1):
            with self.phases.inside(FORWARD):
                loss = self.engine(*inputs_and_labels(batch))
            with self.phases.inside(BACKWARD):
                self.engine.backward(loss * scale if scale != 1.0 else loss)
            if number == len(batches) and self.stage == 0 and self.precision == "fp32":
                # Here DeepSpeed uses the plain optimizer and does not return the norm of the mean gradient.
                gradients = [parameter.grad for parameter in self.engine.parameters() if parameter.grad is not None]
                bare_norm = norm_of(gradients)
            with self.phases.inside(OPTIMIZER):
                self.engine.step()  # updates after the last micro-batch only
            total += loss.detach().float()
        overflow = bool(getattr(self.engine.optimizer, "overflow", False))
        if self.scaler is not None:
            self.scaler.update(torch.tensor(overflow))
        norm = self.engine.get_global_grad_norm() if bare_norm is None else bare_norm
        return Step(total / len(batches), math.inf if overflow else norm_of_taken_step(norm / scale))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        self.engine.eval()
        return _mean([self.engine(*inputs_and_labels(batch)) for batch in heartbeat.touching(batches)])

    @torch.no_grad()
    def logits(self, batches: Sequence[Tensor], last: Sequence[Tensor]) -> Tensor:
        self.engine.eval()
        return torch.cat([at(self.engine(batch), place) for batch, place in zip(batches, last, strict=True)])

    def files(self, rank: int, saved: int) -> tuple[str, ...]:
        if saved != self.world_size and self.stage > 0:
            # This rank's partitions are in several of the saved ranks' files.
            return tuple(dict.fromkeys(name for number in range(saved) for name in self._files_of(number)))
        return self._files_of(rank)

    def _files_of(self, rank: int) -> tuple[str, ...]:
        """Returns the files that a rank writes, the model first."""
        model = zero_file(rank, "model") if self.stage == 3 else "mp_rank_00_model_states.pt"
        prefix = "bf16_" if self.precision == "bf16" else ""
        optimizer = zero_file(rank, "optim", prefix)
        return (model, optimizer) if self.stage > 0 else (model,)

    def shard_files(self, folder: Path) -> tuple[str, ...]:  # noqa: ARG002  their names say what they hold
        return ()

    def save(self, folder: Path, leaders: Sequence[int], background: dist.ProcessGroup | None) -> Write:
        # DeepSpeed lets only rank 0 write the common files; nodes that share no folder need a copy each.
        self.engine.save_non_zero_checkpoint = dist.get_rank() in leaders or self.stage == 3
        own = {"loss_scaler": self.scaler.state()} if self.scaler is not None else {}
        save = partial(
            self.engine.save_checkpoint, str(folder.parent), tag=folder.name, client_state=own, save_latest=False
        )
        if self.on_nvme:
            # A copy in memory is what the run has no room for.
            with states_on_nvme(self.engine):
                write_by_torch_save(save, (self.engine, "_copy_recovery_script"), from_copy=False)()
            return lambda: None
        return write_by_torch_save(save, (self.engine, "_copy_recovery_script"), from_copy=background is not None)

    def load(self, folder: Path, saved: int) -> None:
        other = saved != self.world_size and self.stage > 0
        swapped = states_on_nvme(self.engine) if self.on_nvme else nullcontext()
        moved = resharded(self.engine, folder, self._files_of, saved) if other else nullcontext()
        with safe_torch_load(mmap=self.on_nvme), swapped, moved, keeping_settings(self.engine.optimizer):
            _, own = self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if self.scaler is not None:
            self.scaler.restore(own["loss_scaler"])


def _partition(model: LayeredModel, zero_init: Callable[..., Any], device: torch.device) -> None:
    """Draws the initial weights one at a time; DeepSpeed keeps this rank's partition of each."""
    drawn, swapper = copy.deepcopy(model), None

    def take(name: str, whole: Tensor) -> None:
        nonlocal swapper
        module, _, key = name.rpartition(".")
        parameter: Any = nn.Parameter(whole.to(device, drawn.get_parameter(name).dtype))
        setattr(model.get_submodule(module), key, parameter)
        # Each new swapper would remove the files of the one before.
        zero_init(module=nn.ParameterList([parameter]), param_swapper=swapper)
        swapper = parameter.nvme_swapper

    draw_weights(drawn, take)


def at(logits: Tensor, places: Tensor) -> Tensor:
    """Returns each sample's logits at its place: [samples, vocabulary]."""
    return logits[torch.arange(len(places), device=logits.device), places]


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).float().mean()


def norm_of(gradients: list[Tensor]) -> Tensor:
    """Returns the 2-norm of all gradients as one vector. torch has get_total_norm only since 2.6."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _set_lr(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _read_deepspeed_config(run_folder: Path, world_size: int) -> dict[str, Any]:
    path = run_folder / DEEPSPEED_CONFIG
    todo = "start the run with `tridock launch` or `tridock train`, which write it"
    with RequestError.in_place_of((OSError, ValueError), path, "cannot be read; strategy zero needs it", todo):
        config: dict[str, Any] = json.loads(path.read_bytes())
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    if micro * steps * world_size != config["train_batch_size"]:
        ranks = config["train_batch_size"] // (micro * steps)
        raise RequestError(Problem(str(path), f"was made for {ranks} ranks", f"{world_size} ranks", todo))
    return config


def import_deepspeed(ranks: Ranks) -> Any:
    """Imports DeepSpeed, which then logs warnings only by default, and attaches it to the existing process group."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import set_log_level_from_string

    set_log_level_from_string(os.environ.get(environment.DEEPSPEED_LOG_LEVEL, "warning"))
    if ranks.device.type == "cpu":
        # DeepSpeed would compile a shared-memory collective, which is for inference only, while the ranks wait.
        deepspeed.ops.__compatible_ops__ = {}
        # DeepSpeed refuses fp16 on CPUs without instructions for it, although torch computes it.
        type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    # From DeepSpeed's own calls; each rank's log would have the warning.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+. is deprecated", category=FutureWarning)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed
