"""Training steps, evaluation and checkpoints by megatron-core, with the interface of :class:`Strategy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from tridock.engines import rules_of
from tridock.engines.progress import Progress
from tridock.experiment.parameters import model_parameters
from tridock.experiment.schema import Experiment
from tridock.train.checkpoints.adam_state import keeping_settings
from tridock.train.checkpoints.files import MEGATRON
from tridock.train.checkpoints.snapshot import Write
from tridock.train.huggingface.weights import Weights
from tridock.train.megatron_core import checkpoint, multi_tensor
from tridock.train.megatron_core.attention import positions
from tridock.train.megatron_core.layout import Layout
from tridock.train.megatron_core.model import DTYPES, GPT, build_chunks
from tridock.train.megatron_core.samples import gpt_splits
from tridock.train.models.gpt import Shape
from tridock.train.parallel.strategies import Batch, Step, at, inputs_and_labels, norm_of_taken_step
from tridock.train.pretrained import pretrained_weights
from tridock.train.rank.phases import BACKWARD, FORWARD, OPTIMIZER, SYNC, WAIT, Phases
from tridock.train.rank.process_group import Ranks, agree_on_errors
from tridock.train.trainer import Parts, check_batch


class MegatronCore:
    """This rank's part of the model, its optimizer, and megatron-core's pipeline schedule."""

    def __init__(
        self,
        experiment: Experiment,
        tokens: int,
        padded: int,
        layout: Layout,
        ranks: Ranks,
        pretrained: Weights | None = None,
    ) -> None:
        self.experiment, self.layout, self.device = experiment, layout, ranks.device
        self._loads = False
        multi_tensor.install()
        self.chunks = build_chunks(experiment, tokens, padded, ranks.device, pretrained)
        self.optimizer = get_megatron_optimizer(
            optimizer_config(experiment), self.chunks, use_gloo_process_groups=False
        )
        multi_tensor.read_norm_once(self.optimizer, ranks.device)
        for optimizer in self.optimizer.chained_optimizers:
            checkpoint.keep_padding(optimizer)
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            # Only the last micro-batch's backward pass sends gradients.
            holds = [each.no_sync for each in self.chunks]
            chunk.config.no_sync_func = holds if len(holds) > 1 else holds[0]
        self.phases = Phases(ranks.device)
        for chunk in self.chunks:
            chunk.config.timers = Timers(self.phases)
        self._rest = WAIT if experiment.parallel.pipeline_model_parallel_size > 1 else BACKWARD
        self.positions = positions(
            experiment.model.seq_length, layout.context_parallel_rank, layout.context_parallel_size
        ).to(ranks.device)

    @property
    def loss_scale(self) -> float:
        return float(self.optimizer.get_loss_scale().item()) if self.experiment.precision == "fp16" else 1.0

    def step(self, batches: Sequence[Batch], lr: float) -> Step:
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.phases.inside(self._rest):
            loss = self._pass(batches, forward_only=False)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.experiment.optimizer.weight_decay * group["wd_mult"]
        with self.phases.inside(OPTIMIZER):
            good, norm, _ = self.optimizer.step()
            return Step(loss, norm_of_taken_step(float(norm)) if good else math.inf)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        for chunk in self.chunks:
            chunk.eval()
        return self._pass(batches, forward_only=True)

    @torch.no_grad()
    def logits(self, batches: Sequence[Tensor], last: Sequence[Tensor]) -> Tensor | None:
        for chunk in self.chunks:
            chunk.eval()
        found = self._through_stages(self._ask, list(zip(batches, last, strict=True)), True, collect_non_loss_data=True)
        return torch.cat(found) if found else None

    def _pass(self, batches: Sequence[Batch], forward_only: bool) -> Tensor:
        """Runs all micro-batches through the pipeline; returns their mean loss on all ranks."""
        losses = self._through_stages(self._forward, batches, forward_only)
        return self.layout.share(torch.stack(losses).mean() if losses else None, self.device)

    def _through_stages(
        self, forward: Callable[..., Any], batches: Sequence[Any], forward_only: bool, **options: bool
    ) -> list[Tensor]:
        """Runs megatron-core's schedule on all micro-batches.

        Returns, on the last stage only, the results of the function that ``forward`` returns second.
        """
        found: list[Tensor] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=self.experiment.model.seq_length,
            micro_batch_size=self.experiment.batch.micro_batch_size,
            forward_only=forward_only,
            **options,
        )
        return found

    def _forward(self, batches: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Any]:
        tokens, labels = (it[:, self.positions] for it in inputs_and_labels(next(batches)))
        places = self.positions.expand_as(tokens)
        return chunk(tokens, places, None, labels=labels), mean_loss

    def _ask(self, batches: Iterator[tuple[Tensor, Tensor]], chunk: nn.Module) -> tuple[Tensor, Any]:
        batch, last = next(batches)
        tokens, places = batch[:, self.positions], self.positions.expand(len(batch), -1)

        def logits_at(output: Tensor, non_loss_data: bool) -> Tensor:  # noqa: ARG001  megatron-core names it
            # Another context parallel rank has the last token of some samples.
            here = self.positions == last.unsqueeze(1)
            found = at(output, here.int().argmax(1)).float().masked_fill(~here.any(1, keepdim=True), math.nan)
            return tensor_parallel.gather_from_tensor_model_parallel_region(found)

        return chunk(tokens, places, None), logits_at

    def files(self, rank: int, saved: int) -> tuple[str, ...]:  # noqa: ARG002  each rank reads what it needs of all
        return checkpoint.FILES

    def shard_files(self, folder: Path) -> tuple[str, ...]:
        self._prepare_load()
        return checkpoint.shard_files(self._state(is_loading=True), folder)

    def save(self, folder: Path, leaders: Sequence[int], background: dist.ProcessGroup | None) -> Write:
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)  # otherwise the next forward pass gathers the new weights
        return checkpoint.save(self._state(is_loading=False), folder, leaders, background)

    def load(self, folder: Path, saved: int) -> None:  # noqa: ARG002  whoever wrote it
        self._prepare_load()
        state = checkpoint.load(self._state(is_loading=True), folder)
        for name, model in self._named():
            model.load_state_dict(state[name] | {key: _NO_STATE for key in model.state_dict() if _is_extra(key)})
        with keeping_settings(self.optimizer):
            self.optimizer.load_state_dict(state["optimizer"])
        for optimizer in self.optimizer.chained_optimizers:
            checkpoint.after_load(optimizer)

    def _prepare_load(self) -> None:
        if not self._loads:
            self._loads = True
            for optimizer in self.optimizer.chained_optimizers:
                checkpoint.before_load(optimizer)

    def _named(self) -> Iterator[tuple[str, GPT]]:
        """Yields the models inside the chunks, with Megatron-LM's names of them in a checkpoint."""
        for number, chunk in enumerate(self.chunks):
            model = chunk.module if self.experiment.precision == "fp32" else chunk.module.module
            yield f"model{number}" if len(self.chunks) > 1 else "model", model

    def _state(self, is_loading: bool) -> dict[str, Any]:
        """Returns the contents of a checkpoint, each part with its place in the whole: any layout can load it."""
        metadata = {
            "non_homogeneous_layers": True,
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state: dict[str, Any] = {}
        for name, model in self._named():
            weights = model.sharded_state_dict(metadata=metadata)
            state[name] = {key: weight for key, weight in weights.items() if not _is_extra(key)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state


_NO_STATE: Final = torch.empty(0, dtype=torch.uint8)


def _is_extra(key: str) -> bool:
    """Returns whether it is the extra state of a layer, which checkpoints leave out. transformer-engine's has no
    weight, is pickled, and is not the same for layers of megatron-core."""
    return key.endswith("_extra_state")


def mean_loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sum of the losses and the number of tokens, for megatron-core, and the mean, which it collects."""
    total = losses.float().sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
    return total, count, total.detach() / count


def optimizer_config(experiment: Experiment) -> OptimizerConfig:
    """Returns megatron-core's configuration of the optimizer; the learning rate is set at every step."""
    optimizer, fp16 = experiment.optimizer, experiment.fp16
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        # 0 would also disable the norm, which the run always reports.
        clip_grad=optimizer.clip_grad or math.inf,
        fp16=experiment.precision == "fp16",
        bf16=experiment.precision == "bf16",
        params_dtype=DTYPES[experiment.precision],
        loss_scale=fp16.loss_scale or None,
        initial_loss_scale=2.0**fp16.initial_scale_power,
        min_loss_scale=1.0,
        loss_scale_window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        use_distributed_optimizer=experiment.parallel.use_distributed_optimizer,
    )


_PHASES: Final = {
    "forward-compute": FORWARD,
    "backward-compute": BACKWARD,
    "all-grads-sync": SYNC,
    "embedding-grads-all-reduce": SYNC,
    "non-tensor-parallel-grads-all-reduce": SYNC,
}


class Timers:
    """Megatron's ``config.timers``: a call with a timer's name returns that timer."""

    def __init__(self, phases: Phases) -> None:
        self._timers = {name: Timer(phases, phase) for name, phase in _PHASES.items()}
        self._none = Timer(phases, None)

    def __call__(self, name: str, log_level: int | None = None) -> Timer:  # noqa: ARG002  all that are known are taken
        return self._timers.get(name, self._none)


class Timer:
    """One of Megatron's timers; it measures a phase, or does nothing."""

    def __init__(self, phases: Phases, phase: str | None) -> None:
        self._phases, self._phase = phases, phase
        self._inside: AbstractContextManager[None] | None = None

    def start(self, barrier: bool = False) -> None:  # noqa: ARG002  nobody waits for being timed
        if self._phase is not None:
            self._inside = self._phases.inside(self._phase)
            self._inside.__enter__()

    def stop(self, barrier: bool = False) -> None:  # noqa: ARG002
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None


def megatron_core_parts(experiment: Experiment, _run_folder: Path, workspace: Path, ranks: Ranks) -> Parts:
    """Creates the groups, reads the data and builds this rank's part of the model. A collective."""
    layout = Layout.form(experiment.parallel)
    layout.reseed(experiment.train.seed, 0)
    experiment = experiment.resolved(layout.data_parallel_size)
    with agree_on_errors(ranks):
        check_batch(experiment, layout.data_parallel_size)
        splits = gpt_splits(experiment, workspace)
        tokens = splits["train"].vocab_size
        pretrained = pretrained_weights(experiment, workspace, tokens)
    # A checkpoint fits another tensor parallel size, whose padding is another: it goes by the one without.
    shape = Shape.of(experiment.model, tokens)
    padded = rules_of(experiment).padded_vocab_size(shape.padded_vocab_size, experiment)
    strategy = MegatronCore(experiment, tokens, padded, layout, ranks, pretrained)
    if ranks.first and ranks.device.type == "cuda":
        print(f"note: layers of {strategy.chunks[0].config.transformer_impl}", flush=True)
    return Parts(
        splits=splits,
        strategy=strategy,
        progress=Progress.of(experiment, ranks.world_size, tokens),
        parameters=model_parameters(experiment.model, padded),
        description=layout.description,
        replica=layout.data_parallel_rank,
        replicas=layout.data_parallel_size,
        reseed=lambda iteration: layout.reseed(experiment.train.seed, iteration),
        checkpoint_names=MEGATRON,
    )
