"""The training loop of engines ``torch`` and ``megatron-core``, which supply their own :class:`Parts`."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from tridock.contracts import heartbeat
from tridock.contracts.checkpoints import PROGRESS
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.prerequisites import compiler_problems
from tridock.contracts.run_folder import CHECKPOINTS
from tridock.contracts.tokenizers import sha256_of_data
from tridock.engines import rules_of
from tridock.engines.progress import Progress, check_fit, read_progress
from tridock.engines.torch.fsdp import is_sharded
from tridock.errors import Problem, RequestError, RunError
from tridock.experiment.schema import Experiment
from tridock.experiment.training import learning_rate
from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.checkpoints.choice import choose, holds_checkpoint
from tridock.train.checkpoints.files import TORCH, Names
from tridock.train.checkpoints.saver import Saver, needs_group, saves_in_background
from tridock.train.data.blend import BlendedSamples
from tridock.train.data.dataset import mixed_seed
from tridock.train.data.images import load_images
from tridock.train.data.prefetch import Arrays, Prefetcher, Split
from tridock.train.data.splits import load_splits
from tridock.train.models.gpt import GPT, Shape
from tridock.train.models.layered import LayeredModel
from tridock.train.models.resnet import ResNet
from tridock.train.parallel.mesh import STAGES, Mesh
from tridock.train.parallel.mesh_strategy import MeshStrategy
from tridock.train.parallel.strategies import Step, Strategy, build_strategy
from tridock.train.pretrained import pretrained_weights
from tridock.train.rank import signals
from tridock.train.rank.health import Health, Seen
from tridock.train.rank.metrics import Metrics
from tridock.train.rank.phases import DATA, EVALUATION, step_seconds
from tridock.train.rank.process_group import AgreedError, AnyRank, PeakMemory, Ranks, agree_on_errors, mean_over_ranks
from tridock.train.rank.profiling import Profiling
from tridock.train.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the loop that an engine supplies."""

    splits: Mapping[str, Split]
    strategy: Strategy
    progress: Progress
    """The progress of a new run."""
    parameters: int
    """The number of parameters of the whole model."""
    description: str
    """The parallel layout, to print."""
    replica: int
    """The index of this rank's data parallel replica."""
    replicas: int
    reseed: Callable[[int], None]
    """Seeds dropout for an iteration, so that a resumed run draws the same numbers."""
    checkpoint_names: Names = TORCH


Build = Callable[[Experiment, Path, Path, Ranks], Parts]
"""Builds an engine's parts from the experiment, the run folder, the workspace and the ranks. A collective."""


def torch_parts(experiment: Experiment, run_folder: Path, workspace: Path, ranks: Ranks) -> Parts:
    """Builds the parts of engine ``torch``. A collective."""
    mesh = Mesh.form(experiment.parallel, ranks) if is_sharded(experiment) else None
    replica, replicas = (ranks.rank, ranks.world_size) if mesh is None else (mesh.replica, mesh.replicas)
    stage = (
        0 if mesh is None else mesh.coordinate(STAGES)
    )  # stages draw different numbers, tensor parallel ranks the same ones
    experiment = experiment.resolved(replicas)
    with agree_on_errors(ranks):
        check_batch(experiment, replicas)
        if experiment.train.compile and (missing := list(compiler_problems(ranks.device.type))):
            raise RequestError(missing)
        splits = (load_images if experiment.model.is_vision else load_splits)(experiment, workspace)
    tokens = splits["train"].vocab_size
    torch.manual_seed(experiment.train.seed)  # the same weights on all ranks
    with torch.device("meta"):  # a strategy allocates what a rank keeps
        if experiment.model.is_vision:
            model: LayeredModel = ResNet(experiment.model)
        else:
            model = GPT(Shape.of(experiment.model, tokens))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with agree_on_errors(ranks):
        if (weights := pretrained_weights(experiment, workspace, tokens)) is not None:
            model.given_weights = weights.items
        if mesh is None:
            if experiment.train.compile:
                model.compile_layers()
            strategy: Strategy = build_strategy(model, experiment, ranks, run_folder)
        else:
            strategy = MeshStrategy(model, experiment, ranks, mesh)
        if weights is not None:
            weights.close()
    seed = experiment.train.seed + 100 * stage
    zero = f" stage {experiment.parallel.zero_stage}" if experiment.parallel.strategy == "zero" else ""
    return Parts(
        splits=splits,
        strategy=strategy,
        progress=Progress.of(experiment, ranks.world_size, tokens),
        parameters=parameters,
        description=f"{experiment.parallel.strategy}{zero}" if mesh is None else mesh.description,
        replica=replica,
        replicas=replicas,
        reseed=lambda iteration: _reseed(mixed_seed(seed, replica, iteration) >> 1, ranks.device),
    )


def _reseed(seed: int, device: torch.device) -> None:
    """Seeds like torch.manual_seed, which without a GPU also records its caller's stack."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class Trainer:
    """Trains an experiment on this rank, and logs, evaluates, samples and saves."""

    def __init__(
        self, experiment: Experiment, run_folder: Path, workspace: Path, ranks: Ranks, build: Build = torch_parts
    ) -> None:
        self.run_folder, self.ranks = run_folder, ranks
        self.parts = parts = build(experiment, run_folder, workspace, ranks)
        self.experiment = experiment.resolved(parts.replicas)
        self.global_batch = self.experiment.batch.samples_per_step(parts.replicas)
        self.strategy, self.splits = parts.strategy, parts.splits
        self.progress = replace(parts.progress, tokenizer_sha256=sha256_of_data(workspace / experiment.data.prefix))
        self.phases, self.memory = parts.strategy.phases, PeakMemory(ranks)
        self.prefetcher = Prefetcher(self.read, ranks.device)
        saved_in = experiment.train.checkpoint_folder
        folder = run_folder / CHECKPOINTS if saved_in is None else workspace / saved_in
        train = experiment.train
        self.checkpoints = Checkpoints(folder, ranks, parts.checkpoint_names, needs_group(train))
        copy = self.checkpoints.copy if train.checkpoint_copies > 1 else None
        self.saver = Saver(ranks, run_folder, self.phases, saves_in_background(train), copy)
        loaded = None
        if experiment.train.pretrained_folder is not None:
            self.event(Event.CHECKPOINT_LOADED, folder=experiment.train.load, iteration=0)
        elif experiment.train.load is not None:
            source = workspace / experiment.train.load
            if experiment.train.loads_own_folder and not holds_checkpoint(source, parts.checkpoint_names, ranks):
                self.say(f"{source} holds no checkpoint yet: training begins from scratch")
            else:
                loaded = self.load(source)
        if experiment.train.save:
            self.saver.set_aside(self.checkpoints, self.progress.iteration, loaded)
        self.health = Health(self.experiment, self.progress.iteration, self.progress.updates, ranks.device)
        self._saved: int | None = None
        self._logged_skips = 0
        self.metrics = Metrics(run_folder, active=ranks.first, tensorboard=experiment.train.tensorboard)
        self.metrics.rewind(self.progress.iteration)
        train = self.experiment.train
        self.profiling = Profiling(train.profile_iters, train.train_iters, run_folder, ranks)
        self._logged_at, self._logged_iteration = time.monotonic(), self.progress.iteration
        self._compiles_evaluation = experiment.train.compile
        self._any_rank = AnyRank(ranks)
        self._sampler = None
        if train.sample_prompts:
            tokens = self.splits["train"].vocab_size
            self._sampler = Sampler(self.experiment, workspace, self.strategy, tokens, ranks)

    def run(self) -> None:
        """Trains from the loaded iteration to the last one, then evaluates on the test split."""
        self.announce()
        self.phases.read()  # the time before belongs to no step
        heartbeat.beat(heartbeat.FIRST_STEP, self.progress.iteration)
        with self.saver.finishing(), signals.save_on_signal() if self.experiment.train.save else nullcontext():
            for iteration in range(self.progress.iteration + 1, self.experiment.train.train_iters + 1):
                self.iterate(iteration)
        self.evaluate("test")
        if not self.experiment.train.eval_interval:
            self.sample()
        self.metrics.close()

    def iterate(self, iteration: int) -> None:
        """Runs one step, then logs, evaluates and saves if due. A preempted run saves and raises :class:`Preempted`."""
        train = self.experiment.train
        last = iteration == train.train_iters
        self.profiling.before(iteration)
        step = self.step(iteration)
        self.saver.check()
        if iteration == 1 or last or iteration % train.log_interval == 0:
            self.log(iteration, step)
        self.profiling.after(iteration)
        is_preempted = train.save and signals.save_requested(self._any_rank)
        if train.eval_interval and not is_preempted and (last or iteration % train.eval_interval == 0):
            self.evaluate("valid")
            self.sample()
        if train.save and (last or is_preempted or (train.save_interval and iteration % train.save_interval == 0)):
            self.save(is_last=last or is_preempted)
        if is_preempted:
            self.metrics.close()
            raise signals.Preempted(iteration)

    def step(self, iteration: int) -> Step:
        """Runs one optimizer step on the next global batch; returns its loss and gradient norm."""
        self.parts.reseed(iteration)
        first = self.progress.consumed_samples
        end = first + self.global_batch
        then = end if iteration < self.experiment.train.train_iters else None
        with self.phases.inside(DATA):
            batches = self.prefetcher.get(self.splits["train"], first, then)
        lr = learning_rate(iteration, self.experiment.optimizer, self.experiment.train.train_iters)
        step = self.strategy.step(batches, lr)
        self.health.add(step.loss, step.grad_norm)
        self.progress = replace(self.progress, iteration=iteration, consumed_samples=end)
        heartbeat.beat(heartbeat.TRAIN, iteration)
        return step

    def read(self, samples: Split, first: int) -> Iterable[Arrays]:
        """Returns this rank's micro-batches of the global batch that starts at sample ``first``."""
        micro, parts = self.experiment.batch.micro_batch_size, self.parts
        return samples.batches(first, self.global_batch, micro, parts.replica, parts.replicas)

    def log(self, iteration: int, step: Step) -> None:
        """Prints a line and writes one to metrics.jsonl. Raises :class:`AgreedError` if the loss is not finite, or the
        run trains nothing."""
        loss, grad_norm, seen = mean_over_ranks(step.loss), float(step.grad_norm), self.health.look()
        now, phases = time.monotonic(), self.phases.read()  # of one moment: they add up to the step's time
        steps = max(1, iteration - self._logged_iteration)
        step_time = (now - self._logged_at) / steps
        self._logged_at, self._logged_iteration = now, iteration
        train, model = self.experiment.train, self.experiment.model
        speed = self.global_batch * model.seq_length / step_time
        lr = learning_rate(iteration, self.experiment.optimizer, train.train_iters)
        skips, self._logged_skips = seen.skipped - self._logged_skips, seen.skipped
        loss_scale = self.strategy.loss_scale
        self.metrics.iteration(
            {
                "iteration": iteration,
                "loss": loss,
                "lr": lr,
                "grad_norm": grad_norm,
                "step_time_s": step_time,
                "samples_per_second" if model.is_vision else "tokens_per_second": speed,
                "consumed_samples": self.progress.consumed_samples,
                "loss_scale": loss_scale,
                **({"skipped_steps": skips} if self.experiment.precision == "fp16" else {}),
                "phases": step_seconds(phases, steps),
                **self.memory.metrics(),
            }
        )
        remaining = timedelta(seconds=round(step_time * (train.train_iters - iteration)))
        width = len(str(train.train_iters))
        line = f"iteration {iteration:{width}d}/{train.train_iters} | loss {loss:.4f} | lr {lr:.3e}"
        digits = 1 if model.is_vision else 0
        line += f" | grad norm {grad_norm:.3f} | {speed:,.{digits}f} {model.unit}/s | {remaining} left"
        if self.experiment.precision == "fp16":
            line += f" | loss scale {loss_scale:g}"
        if math.isinf(grad_norm):
            line += " | step skipped: the gradient overflowed"
        if skips > math.isinf(grad_norm):
            line += f" | {skips} of {steps} steps skipped"
        self.say(line)
        self._condemn(seen)
        if not math.isfinite(loss):
            todo = "lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or use bf16 or fp32"
            what, cause = "the loss is not finite", Cause.LOSS_NOT_FINITE
            raise AgreedError(RunError(Problem(f"iteration {iteration}", what, str(loss), todo, cause=cause)))
        if (problem := self.health.idleness(seen, loss_scale)) is not None:
            raise AgreedError(RunError(problem))

    def _condemn(self, seen: Seen) -> None:
        """Marks the last checkpoint if its weights have turned out to yield no finite loss. A collective."""
        if self._saved is not None and seen.ill is not None and seen.condemns(self._saved):
            self.saver.condemn(self.checkpoints, self._saved, seen.ill)
            self._saved = None

    def evaluate(self, split: str) -> None:
        """Records the mean loss over the first ``eval_iters`` global batches of a split, always the same samples.

        If its data have names: the loss of each, and their mean."""
        sets = {key.partition("/")[2]: it for key, it in self.splits.items() if key.partition("/")[0] == split}
        if not all(samples.per_epoch for samples in sets.values()):
            self.say(f"no {split} loss: the {split} split holds less than one sample")
            return
        started = time.monotonic()
        with self.phases.inside(EVALUATION):
            losses = {name: self._loss(samples) for name, samples in sets.items()}
        seconds, iteration = time.monotonic() - started, self.progress.iteration
        loss, named = sum(losses.values()) / len(losses), {} if "" in losses else {"losses": losses}
        self.metrics.evaluation(iteration, split, loss, **named)
        self.event(Event.EVALUATION, iteration=iteration, split=split, loss=loss, seconds=round(seconds, 3), **named)
        each = ", ".join(f"{name} {one:.4f}" for name, one in losses.items() if name)
        self.say(f"{split} loss after iteration {iteration}: {loss:.4f}{each and f' ({each})'}")
        self._logged_at += seconds  # not training time
        heartbeat.beat(heartbeat.TRAIN)

    def _loss(self, samples: Split) -> float:
        """Returns the mean loss over the first ``eval_iters`` global batches."""
        total, count = torch.zeros((), device=self.ranks.device), self.experiment.train.eval_iters
        size = self.global_batch
        for number in range(count):
            self.begin_pass()
            then = (number + 1) * size if number + 1 < count else None
            total += self.strategy.evaluate(self.prefetcher.get(samples, number * size, then))
        return mean_over_ranks(total / count)

    def begin_pass(self) -> None:
        """Writes a heartbeat before a forward pass without gradients.

        The first pass may compile the layers again, so it has the time limit of a first step.
        """
        compiles, self._compiles_evaluation = self._compiles_evaluation, False
        heartbeat.beat(heartbeat.FIRST_STEP if compiles else heartbeat.EVAL)

    def sample(self) -> None:
        """Records how the model continues ``train.sample_prompts``."""
        if self._sampler is None:
            return
        started, iteration, prompts = time.monotonic(), self.progress.iteration, self.experiment.train.sample_prompts
        with self.phases.inside(EVALUATION):
            texts = self._sampler.texts(self.begin_pass)
        seconds = time.monotonic() - started
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=False)]
        self.event(Event.SAMPLES, iteration=iteration, samples=samples, seconds=round(seconds, 3))
        self.metrics.samples(iteration, samples)
        for it in samples:
            self.say(f"sample after iteration {iteration}: {(it['prompt'] + it['text'])!r}")
        self._logged_at += seconds  # not training time
        heartbeat.beat(heartbeat.TRAIN)

    def load(self, source: Path) -> Path:
        """Resumes from a checkpoint, or from the newest complete one in a folder; returns it. A collective."""
        fresh, rank, chosen = self.progress, self.ranks.rank, self.experiment.train.override_checkpoint

        def needed(folder: Path, _names: Collection[str]) -> Iterator[Collection[str]]:
            yield (PROGRESS,)
            try:
                saved = read_progress(folder)
                check_fit(folder, saved, fresh, chosen)
            except RequestError:
                return  # it does not fit, which is reported below
            yield self.strategy.files(rank, saved.data_parallel_size)
            yield self.strategy.shard_files(folder)

        folder = choose(source, self.parts.checkpoint_names, self.ranks, needed, self.run_folder)
        with agree_on_errors(self.ranks):
            saved = read_progress(folder)
            check_fit(folder, saved, fresh, chosen)
        self.strategy.load(folder, saved.data_parallel_size)
        done = {name: getattr(saved, name) for name in ("iteration", "consumed_samples", "updates")}
        self.progress = replace(fresh, **done)
        self.event(Event.CHECKPOINT_LOADED, folder=str(folder), iteration=self.progress.iteration)
        return folder

    def save(self, is_last: bool) -> None:
        """Saves a checkpoint. A write error ends the run only if this ``is_last``. A collective."""
        seen = self.health.look()
        self._condemn(seen)
        own = {PROGRESS: replace(self.progress, updates=self.health.updates(seen)).to_bytes()}
        needed = (*own, *self.strategy.files(self.ranks.rank, self.ranks.world_size))
        iteration, keep = self.progress.iteration, self.experiment.train.keep_checkpoints
        start = partial(self.checkpoints.start, self.strategy.save, iteration, own, needed, keep, seen.ill)
        self._logged_at += self.saver.save(start, iteration, is_last, seen.ill)  # not training time
        self._saved = iteration

    def announce(self) -> None:
        """Prints the model, the layout and the data in two lines."""
        experiment, ranks = self.experiment, self.ranks
        train = self.splits["train"]
        self.say(
            f"{experiment.name}: {self.parts.parameters / 1e6:.2f} M parameters, {self.parts.description}, "
            f"{experiment.precision}, {ranks.world_size} {ranks.device.type} ranks"
        )
        rows = rules_of(experiment).padded_vocab_size(train.vocab_size, experiment)
        self.event(Event.MODEL_BUILT, parameters=self.parts.parameters, padded_vocab_size=rows)
        kinds = f"{train.vocab_size} classes" if experiment.model.is_vision else f"vocabulary of {train.vocab_size}"
        self.say(f"data: {train.description} an epoch, {self.global_batch} a step, {kinds}")
        if isinstance(train, BlendedSamples):
            for line in train.epochs(experiment.train.train_iters * self.global_batch):
                self.say(f"data: {line}")

    def say(self, line: str) -> None:
        if self.ranks.first:
            print(line, flush=True)

    def event(self, event: Event, **fields: object) -> None:
        if self.ranks.first:
            append_event(self.run_folder, event, **fields)


def check_batch(experiment: Experiment, data_parallel_size: int) -> None:
    """Raises :class:`RequestError` if the ranks would run different numbers of micro-batches."""
    batch = experiment.batch
    samples, given = batch.micro_batch_size * data_parallel_size, batch.samples_per_step(data_parallel_size)
    if given % samples:
        product = f"{batch.micro_batch_size} x {data_parallel_size}"
        what = f"is no multiple of micro_batch_size x data parallel ranks = {product}"
        todo = f"use a multiple of {samples}"
        raise RequestError(Problem("batch.global_batch_size", what, str(given), todo))
