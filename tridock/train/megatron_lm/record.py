"""Hooks into ``megatron.training`` of Megatron-LM v1.1.5 that record metrics and events from its own values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from tridock.contracts import heartbeat
from tridock.contracts.checkpoints import LAYOUT
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.records import read_object
from tridock.contracts.tokenizers import TOKENIZER_SHA256, sha256_of_data
from tridock.engines.megatron_lm.checkpoint_layout import TRAINING, UPDATES, CheckpointLayout, checkpoint_problems
from tridock.errors import Problem, RequestError, RunError
from tridock.experiment.parameters import model_parameters
from tridock.experiment.schema import Experiment
from tridock.experiment.training import training_fields
from tridock.train.checkpoints.adam_state import keeping_settings
from tridock.train.checkpoints.saver import Saver, saves_in_background
from tridock.train.megatron_lm.checkpoint import UpstreamCheckpoints
from tridock.train.parallel.strategies import norm_of, norm_of_taken_step
from tridock.train.rank import signals
from tridock.train.rank.health import Health, Seen
from tridock.train.rank.metrics import Metrics
from tridock.train.rank.phases import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, SYNC, WAIT, Phases, step_seconds
from tridock.train.rank.process_group import AgreedError, AnyRank, PeakMemory, Ranks, agree_on_errors
from tridock.train.rank.profiling import Profiling


class Recorder:
    """Wraps the functions that Megatron's loop calls; upstream's code and output are unchanged."""

    def __init__(self, training: Any, experiment: Experiment, run_folder: Path, ranks: Ranks) -> None:
        self.experiment, self.run_folder, self.first = experiment, run_folder, ranks.first
        self._ranks, self._any_rank = ranks, AnyRank(ranks)
        # Megatron writes the TensorBoard files itself.
        self.metrics = Metrics(run_folder, active=ranks.first, tensorboard=False)
        self.phases, self.memory = Phases(ranks.device), PeakMemory(ranks)
        self.iteration = 0
        train = experiment.train
        self.profiling = Profiling(train.profile_iters, train.train_iters, run_folder, ranks)
        self._lr = 0.0
        self._model: Any = None
        self._optimizers: tuple[Any, ...] = ()
        self._leaves, self._is_logged = False, True
        self._loss: float | None = None
        self._saved, self._began_at = -1, 0
        self._updates: int | None = 0
        self._logged_skips = 0
        self._health: Health
        self._applied_norm: Any = None
        self._logged_at, self._logged_iteration = time.monotonic(), 0
        copy = (lambda folder: self._checkpoints.checkpoints.copy(folder)) if train.checkpoint_copies > 1 else None
        self.saver = Saver(ranks, run_folder, self.phases, saves_in_background(train), copy)
        self._upstream = training
        self._original = {name: getattr(training, name) for name in HOOKED}
        for name in HOOKED:
            setattr(training, name, getattr(self, name))

    def train(self, forward: Any, model: Any, *rest: Any) -> int:
        """Wraps the training loop: records the model, and the iteration at which a resumed run starts."""
        self._model, self._optimizers = model, rest[:2]
        self.iteration = self._logged_iteration = self._upstream.get_args().iteration
        time_phases(model, self.phases)
        self.phases.read()  # the time before belongs to no step
        self._logged_at = time.monotonic()
        self._health = Health(self.experiment, self.iteration, self._updates, self._ranks.device, "fp32")
        heartbeat.beat(heartbeat.FIRST_STEP, self.iteration)
        self.metrics.rewind(self.iteration)
        rows = int(self._upstream.get_args().padded_vocab_size)
        self.event(Event.MODEL_BUILT, parameters=model_parameters(self.experiment.model, rows), padded_vocab_size=rows)
        with self.saver.finishing(), signals.save_on_signal() if self.experiment.train.save else nullcontext():
            end: int = self._original["train"](forward, model, *rest)
        self.iteration = end
        return end

    def get_optimizer(self, model: Any) -> Any:
        """Returns upstream's optimizer. Without DeepSpeed its dynamic loss scale would always start at 2**32."""
        optimizer = self._original["get_optimizer"](model)
        if getattr(optimizer, "dynamic_loss_scale", False):
            optimizer.loss_scaler.cur_scale = 2.0**self.experiment.fp16.initial_scale_power
        parallel = self.experiment.parallel
        if parallel.strategy == "ddp" or parallel.zero_stage == 0:  # nothing else computes a norm
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(self._measure)
        return optimizer

    def _measure(self, optimizer: Any, *_: object) -> None:
        """Keeps the norm of the gradient that this rank applies; clipping leaves none finite that was not."""
        weights = (it for group in optimizer.param_groups for it in group["params"])
        self._applied_norm = norm_of([it.grad for it in weights if it.grad is not None])

    def train_step(self, forward: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
        """Runs one optimizer step; returns upstream's results.

        Upstream accumulates gradients only in its pipeline. DeepSpeed accumulates them everywhere and counts micro
        batches itself; an iteration here is all micro batches of the global batch.
        """
        self.profiling.before(self.iteration + 1)
        with self.phases.inside(OPTIMIZER if self._upstream.get_args().pipe_parallel_size == 0 else WAIT):
            forward = self.phases.around(FORWARD, forward)
            losses, skipped = self._step(forward, self._timed(iterator), model, optimizer, scheduler)
        norm = model.get_global_grad_norm() if self._applied_norm is None else self._applied_norm
        overflow = getattr(optimizer, "overflow", False)
        self._health.add(losses["lm loss"].reshape(()), math.inf if overflow else norm_of_taken_step(norm))
        return losses, skipped

    def _timed(self, iterator: Any) -> Any:
        return None if iterator is None else _Timed(iterator, self.phases)

    def backward_step(self, *given: Any) -> Any:
        """Calls upstream's backward step, including its clipping, in a phase of its own."""
        with self.phases.inside(BACKWARD):
            return self._original["backward_step"](*given)

    def _step(self, forward: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
        args = self._upstream.get_args()
        self._lr = optimizer.param_groups[0]["lr"]  # this step's; upstream logs the next step's
        step = self._original["train_step"]
        if args.pipe_parallel_size > 0 or args.gas == 1:
            return step(forward, iterator, model, optimizer, scheduler)
        parts = [step(forward, iterator, model, optimizer, scheduler) for _ in range(args.gas)]
        means = {name: sum(losses[name] for losses, _ in parts) / args.gas for name in parts[0][0]}
        return means, parts[-1][1]

    def training_log(
        self, losses: Any, totals: Any, rate: float, iteration: int, scale: float | None, *rest: Any
    ) -> Any:
        """Writes a line to metrics.jsonl at the first, the last and every ``log_interval``-th iteration.

        Upstream calls it at every iteration: a run that is asked to end saves, and raises :class:`Preempted`.
        """
        train = self.experiment.train
        self.iteration = iteration
        heartbeat.beat(heartbeat.TRAIN, iteration)
        self.saver.check()
        self._is_logged = iteration in (1, train.train_iters) or iteration % train.log_interval == 0
        if self._is_logged:
            self._log(float(losses["lm loss"]), scale)
        reported = self._original["training_log"](losses, totals, rate, iteration, scale, *rest)
        self._is_logged = True
        self.profiling.after(iteration)
        if train.save and signals.save_requested(self._any_rank):
            self._leaves = True
            self.save_checkpoint(iteration, self._model, *self._optimizers)
            raise signals.Preempted(iteration)
        return reported

    def get_tensorboard_writer(self) -> Any:
        """Returns upstream's writer, or None between lines: it reads the loss from the GPU at every iteration."""
        return self._original["get_tensorboard_writer"]() if self._is_logged else None

    def _log(self, loss: float, scale: float | None) -> None:
        iteration, samples = self.iteration, self.experiment.batch.global_batch_size or 0
        now, phases = time.monotonic(), self.phases.read()  # of one moment: they add up to the step's time
        steps = max(1, iteration - self._logged_iteration)
        step_time = (now - self._logged_at) / steps
        self._logged_at, self._logged_iteration = now, iteration
        norm = self._model.get_global_grad_norm() if hasattr(self._model, "get_global_grad_norm") else None
        seen = self._health.look()
        skips, self._logged_skips = seen.skipped - self._logged_skips, seen.skipped
        scale = 1.0 if scale is None else float(scale)
        self.metrics.iteration(
            {
                "iteration": iteration,
                "loss": loss,
                "lr": self._lr,
                "grad_norm": None if norm is None else float(norm),
                "step_time_s": step_time,
                "tokens_per_second": samples * self.experiment.model.seq_length / step_time,
                "consumed_samples": samples * iteration,
                "loss_scale": scale,
                **({"skipped_steps": skips} if self.experiment.precision == "fp16" else {}),
                "phases": step_seconds(phases, steps),
                **self.memory.metrics(),
            }
        )
        self._condemn(seen)
        if not math.isfinite(loss):
            todo = "lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or use fp32"
            what, cause = "the loss is not finite", Cause.LOSS_NOT_FINITE
            raise AgreedError(RunError(Problem(f"iteration {iteration}", what, str(loss), todo, cause=cause)))
        if (problem := self._health.idleness(seen, scale)) is not None:
            raise AgreedError(RunError(problem))

    def _condemn(self, seen: Seen) -> None:
        """Marks the last checkpoint if its weights have turned out to yield no finite loss. A collective."""
        if seen.ill is not None and seen.condemns(self._saved):
            self.saver.condemn(self._checkpoints.checkpoints, self._saved, seen.ill)

    def evaluate(self, forward: Any, *given: Any, **named: Any) -> Any:
        """Keeps the loss that upstream prints, and writes a heartbeat at every batch."""

        def beating(*batch: Any) -> Any:
            heartbeat.beat(heartbeat.EVAL)
            return forward(*batch)

        losses = self._original["evaluate"](beating, *given, **named)
        self._loss = float(losses["lm loss"])
        heartbeat.beat(heartbeat.TRAIN)
        return losses

    def evaluate_and_print_results(
        self, prefix: str, forward: Any, iterator: Any, model: Any, iteration: int, verbose: bool = False
    ) -> None:
        """Writes a line to metrics.jsonl for each evaluation, and once after the loop."""
        if iteration == self.experiment.train.train_iters and prefix.startswith("iteration"):
            return
        started = time.monotonic()
        with self.phases.inside(EVALUATION):
            self._original["evaluate_and_print_results"](prefix, forward, iterator, model, iteration, verbose)
        seconds = time.monotonic() - started
        if self._loss is not None:
            split = "test" if "test" in prefix else "valid"
            self.metrics.evaluation(self.iteration, split, self._loss)
            self.event(
                Event.EVALUATION, iteration=self.iteration, split=split, loss=self._loss, seconds=round(seconds, 3)
            )
        self._logged_at += seconds  # not training time

    def save_checkpoint(self, iteration: int, *given: Any) -> None:
        """Saves a checkpoint. Upstream saves the last iteration twice if ``save_interval`` divides it; this saves once.

        A write error ends the run only at the last checkpoint.
        """
        if iteration == self._saved:
            return
        if self._saved < 0:
            self.saver.set_aside(self._checkpoints.checkpoints, self._began_at, self._checkpoints.loaded)
        seen = self._health.look()
        self._condemn(seen)

        def start(in_background: bool) -> Callable[[], Path]:
            save, layout = self._original["save_checkpoint"], self._layout(self._health.updates(seen))
            return self._checkpoints.start(save, layout, seen.ill, in_background, iteration, *given)

        is_last = iteration == self.experiment.train.train_iters or self._leaves
        self._logged_at += self.saver.save(start, iteration, is_last, seen.ill)  # not training time
        self._saved = iteration

    @property
    def _replicas(self) -> int:
        args = self._upstream.get_args()
        return int(args.world_size // (args.model_parallel_size * max(1, args.pipe_parallel_size)))

    def _layout(self, updates: int | None) -> bytes:
        """Returns what a checkpoint says of itself to the next launch."""
        layout = CheckpointLayout.of(self.experiment, self._replicas).to_json()
        layout[TRAINING], layout[UPDATES] = training_fields(self.experiment), updates
        layout[TOKENIZER_SHA256] = sha256_of_data(self.run_folder.parent.parent / self.experiment.data.prefix)
        return (json.dumps(layout, indent=2) + "\n").encode()

    def _check(self, folder: Path) -> None:
        """Raises :class:`AgreedError` if a checkpoint is of another layout or training. A collective."""
        with agree_on_errors(self._ranks):
            written = read_object(folder / LAYOUT)
            self._updates = written.get(UPDATES)
            RequestError.raise_for(checkpoint_problems(self.experiment, self._replicas, written))

    def load_checkpoint(self, *given: Any, **named: Any) -> int:
        """Loads the checkpoint, and records and returns the iteration from which the run continues."""
        if self._checkpoints.begins():
            self._say(f"{self._upstream.get_args().load} holds no checkpoint yet: training begins from scratch")
            return 0
        load = self._original["load_checkpoint"]
        self._updates = None  # unless the checkpoint says
        with keeping_settings(given[1]):
            iteration = self._began_at = self._checkpoints.load(load, self._check, *given, **named)
        scheduler = given[2]
        scheduler.step(scheduler.num_iters)  # DeepSpeed loads its optimizer last, with the rate of the checkpoint
        self.event(Event.CHECKPOINT_LOADED, folder=str(self._upstream.get_args().load), iteration=iteration)
        return iteration

    @cached_property
    def _checkpoints(self) -> UpstreamCheckpoints:
        return UpstreamCheckpoints(self._upstream.get_args(), self.run_folder, self._ranks, self.experiment.train)

    def _say(self, line: str) -> None:
        if self.first:
            print(line, flush=True)

    def event(self, event: Event, **fields: object) -> None:
        """Writes an event to events.jsonl, on rank 0."""
        if self.first:
            append_event(self.run_folder, event, **fields)


class _Timed:
    """An iterator whose time counts as the phase of data."""

    def __init__(self, iterator: Any, phases: Phases) -> None:
        self._iterator, self._phases = iterator, phases

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        with self._phases.inside(DATA):
            return next(self._iterator)


_INSTRUCTIONS = {
    "LoadMicroBatch": DATA,
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "ReduceGrads": SYNC,
    "ReduceTiedGrads": SYNC,
    "OptimizerStep": OPTIMIZER,
}
"""Phases of the instructions of DeepSpeed's pipeline; all other instructions send or receive."""


def time_phases(model: Any, phases: Phases) -> None:
    """Times gradient exchange, and each instruction of a pipeline, as a phase."""
    for name in ("allreduce_gradients", "allreduce_params"):  # DeepSpeed's engine, and upstream's own DDP
        if hasattr(model, name):
            setattr(model, name, phases.around(SYNC, getattr(model, name)))
    if hasattr(model, "_INSTRUCTION_MAP"):
        model._INSTRUCTION_MAP = {
            kind: phases.around(_INSTRUCTIONS.get(kind.__name__, WAIT), work)
            for kind, work in model._INSTRUCTION_MAP.items()
        }


HOOKED = (
    "get_optimizer",
    "train",
    "train_step",
    "backward_step",
    "training_log",
    "get_tensorboard_writer",
    "evaluate",
    "evaluate_and_print_results",
    "save_checkpoint",
    "load_checkpoint",
)
