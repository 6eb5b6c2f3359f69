"""A rank that saves and loads as engine megatron-deepspeed does, without the source of Megatron-LM v1.1.5.

``python -m tests.distributed.saved_v115 ENGINE RUN_FOLDER``, with ENGINE ``deepspeed`` or ``megatron``. What upstream
does is here as small as Tridock's code needs it, with upstream's signatures; DeepSpeed is the real one.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tridock.contracts.run_folder import CHECKPOINTS, EXPERIMENT
from tridock.experiment import load_experiment
from tridock.train.megatron_lm.record import Recorder
from tridock.train.parallel.strategies import import_deepspeed
from tridock.train.rank.run import end, form_world, run_rank

ITERATIONS = 3


class Upstream(ModuleType):
    """``megatron.training`` and ``megatron.checkpointing`` in one."""

    def __init__(self, args: Namespace) -> None:
        super().__init__("megatron.checkpointing")
        self.args = args
        self.mpu = ModuleType("mpu")
        self.mpu.get_data_parallel_group = lambda: dist.group.WORLD
        self.mpu.get_data_parallel_rank = dist.get_rank

    def get_args(self) -> Namespace:
        return self.args

    def get_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(self, forward: Any, model: Any, optimizer: Any, scheduler: Any) -> int:
        for iteration in range(self.args.iteration + 1, ITERATIONS + 1):
            losses, _ = self.train_step(forward, None, model, optimizer, scheduler)
            self.training_log(losses, {}, 1e-3, iteration, 1.0, False)
            self.save_checkpoint(iteration, model, optimizer, scheduler)
        return ITERATIONS

    def train_step(self, forward: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
        loss = forward(model)
        self.backward_step(optimizer, model, loss)
        (model if self.args.deepspeed else optimizer).step()
        scheduler.step(1)
        return {"lm loss": loss.detach()}, 0

    def backward_step(self, optimizer: Any, model: Any, loss: torch.Tensor) -> None:
        if self.args.deepspeed:
            model.backward(loss)
        else:
            optimizer.zero_grad()
            loss.backward()

    def training_log(self, *_: Any) -> bool:
        return False

    def get_tensorboard_writer(self) -> None: ...

    def evaluate(self, *_: Any) -> None: ...

    def evaluate_and_print_results(self, *_: Any) -> None: ...

    def get_checkpoint_name(self, path: str, iteration: int, release: bool = False, mp_rank: int | None = None) -> str:
        return f"{path}/iter_{iteration:07d}/mp_rank_00/model_optim_rng.pt"

    def get_checkpoint_tracker_filename(self, path: str) -> str:
        return f"{path}/latest_checkpointed_iteration.txt"

    def save_checkpoint(self, iteration: int, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        state = {"iteration": iteration, "torch_rng_state": torch.get_rng_state()}
        if self.args.deepspeed:
            model.save_checkpoint(self.args.save, client_state=state)
        elif self.mpu.get_data_parallel_rank() == 0:
            state |= {"args": self.args, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            file = Path(self.get_checkpoint_name(self.args.save, iteration))
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)
        dist.barrier()
        Path(self.get_checkpoint_tracker_filename(self.args.save)).write_text(str(iteration))

    def load_checkpoint(self, model: Any, optimizer: Any, lr_scheduler: Any, load_arg: str = "load") -> int:
        folder = getattr(self.args, load_arg)
        iteration = int(Path(self.get_checkpoint_tracker_filename(folder)).read_text())
        if self.args.deepspeed:
            _, state = model.load_checkpoint(folder)
        else:
            state = torch.load(self.get_checkpoint_name(folder, iteration), map_location="cpu")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        assert state["iteration"] == iteration
        return iteration


class Scheduler:
    """The part of ``AnnealingLR`` that loading uses."""

    num_iters = 0

    def step(self, step_num: int) -> None:
        self.num_iters = step_num


def train(run_folder: Path, with_deepspeed: bool) -> None:
    ranks = form_world(run_folder)
    deepspeed = import_deepspeed(ranks)
    experiment = load_experiment(run_folder / EXPERIMENT).resolved(1)
    folder = str(run_folder / CHECKPOINTS)
    sizes = {"world_size": 1, "model_parallel_size": 1, "pipe_parallel_size": 0, "gas": 1, "padded_vocab_size": 128}
    upstream = Upstream(Namespace(save=folder, load=folder, deepspeed=with_deepspeed, iteration=0, **sizes))
    sys.modules["megatron.checkpointing"] = upstream
    recorder = Recorder(upstream, experiment, run_folder, ranks)

    torch.manual_seed(1)
    model: Any = torch.nn.Linear(4, 1)
    optimizer = upstream.get_optimizer(model)
    if with_deepspeed:
        config = {"train_batch_size": 1, "zero_optimization": {"stage": experiment.parallel.zero_stage}}
        model, optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
    scheduler = Scheduler()
    upstream.args.iteration = upstream.load_checkpoint(model, optimizer, scheduler)
    upstream.train(lambda model: model(torch.ones(1, 4)).mean(), model, optimizer, scheduler)
    recorder.metrics.close()


if __name__ == "__main__":
    kind, name = sys.argv[1:]
    os.environ["TRIDOCK_WORLD_SIZE"] = "1"
    end(run_rank(Path(name), lambda: train(Path(name), kind == "deepspeed")))
