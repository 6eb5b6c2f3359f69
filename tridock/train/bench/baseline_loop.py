"""The same model in a loop of plain PyTorch, as a user would write it. For ``tridock bench`` only.

It has no data set, log, schedule or supervision: random tokens, forward, backward, clip, step. It takes turns with the
engine in one run, on the same ranks, because two processes of the same program differ by several percent, depending on
their memory layout.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tridock.contracts import heartbeat
from tridock.contracts.events import Event
from tridock.experiment.schema import Experiment
from tridock.train.models.gpt import GPT, Shape, parameter_groups
from tridock.train.parallel.strategies import DTYPES
from tridock.train.rank.phases import EVALUATION
from tridock.train.rank.process_group import Ranks, barrier
from tridock.train.trainer import Build, Trainer


class BaselineLoop:
    """A model of its own, the same as the experiment's, with DDP where there are several ranks."""

    def __init__(self, experiment: Experiment, vocab_size: int, ranks: Ranks) -> None:
        torch.manual_seed(experiment.train.seed)
        shape = Shape.of(experiment.model, vocab_size)
        model = GPT(shape).to(ranks.device)
        if experiment.train.compile:
            model.compile_layers()
        settings = experiment.optimizer
        groups = parameter_groups(model, settings.weight_decay)
        betas = (settings.adam_beta1, settings.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=True)
        self.model: nn.Module = model
        if ranks.world_size > 1:
            self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.largest = settings.clip_grad
        micro, length = experiment.batch.micro_batch_size, experiment.model.seq_length
        self.micro_batches = experiment.batch.accumulation_steps(ranks.world_size)
        tokens = (self.micro_batches, micro, length + 1)
        self.tokens = torch.randint(0, shape.padded_vocab_size, tokens, device=ranks.device)
        short = experiment.precision != "fp32"
        self.cast: Any = torch.autocast(ranks.device.type, DTYPES[experiment.precision]) if short else nullcontext()

    def step(self) -> float:
        """Runs one optimizer step; returns the loss of its last micro-batch."""
        self.optimizer.zero_grad(set_to_none=False)
        for number, batch in enumerate(self.tokens, start=1):
            ddp = self.model if isinstance(self.model, nn.parallel.DistributedDataParallel) else None
            with nullcontext() if ddp is None or number == self.micro_batches else ddp.no_sync(), self.cast:
                loss = self.model(batch[:, :-1], batch[:, 1:])
            (loss / self.micro_batches).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.largest)
        self.optimizer.step()
        return float(loss.item())


@dataclass(frozen=True, slots=True)
class Turns:
    """After ``warmup`` iterations, engine and bare loop take turns of ``steps`` iterations each."""

    warmup: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> Turns:
        """Reads ``<warmup>,<steps>``."""
        return cls(*(int(number) for number in text.split(",")))

    def ends(self, iteration: int) -> bool:
        """Whether a turn ends with this iteration; the warm-up is the first turn."""
        return iteration >= self.warmup and (iteration - self.warmup) % self.steps == 0


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of ``steps`` engine steps and of the same number of bare steps."""

    steps: int
    engine_s: float
    bare_s: float


class BaselineTrainer(Trainer):
    """A run that takes turns with a :class:`BaselineLoop`, and records the length of each turn."""

    def __init__(
        self, experiment: Experiment, run_folder: Path, workspace: Path, ranks: Ranks, build: Build, turns: Turns
    ) -> None:
        super().__init__(experiment, run_folder, workspace, ranks, build)
        self.bare = BaselineLoop(self.experiment, self.splits["train"].vocab_size, ranks)
        self.turns, self.taken = turns, list[Turn]()
        self._steps = 0
        self._engine_s = self._bare_s = 0.0

    def run(self) -> None:
        super().run()
        self.event(
            Event.BESIDE_BARE,
            steps=[turn.steps for turn in self.taken],
            engine_s=[round(turn.engine_s, 6) for turn in self.taken],
            bare_s=[round(turn.bare_s, 6) for turn in self.taken],
        )

    def iterate(self, iteration: int) -> None:
        # The two alternate in going first, so that a machine that slows down affects both.
        if self._steps == 0:
            if len(self.taken) % 2:
                self._run_bare(self.turns.steps)
            barrier()
        began = time.monotonic()
        super().iterate(iteration)
        if self.turns.ends(iteration):
            self._settle()
        self._engine_s += time.monotonic() - began
        self._steps += 1
        if self.turns.ends(iteration):
            if len(self.taken) % 2 == 0:
                self._run_bare(self._steps)
            self.taken.append(Turn(self._steps, self._engine_s, self._bare_s))
            self._steps, self._engine_s = 0, 0.0

    def _run_bare(self, steps: int) -> None:
        heartbeat.beat(heartbeat.FIRST_STEP)  # which has time to compile
        barrier()
        began = time.monotonic()
        with self.phases.inside(EVALUATION):
            for _ in range(steps):
                self.bare.step()
            self._settle()
        self._bare_s = time.monotonic() - began
        self._logged_at += self._bare_s  # not training time
        heartbeat.beat(heartbeat.TRAIN)

    def _settle(self) -> None:
        """Waits for the device, so that its work counts toward the turn that started it."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
