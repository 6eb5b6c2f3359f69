"""What a user would write instead: the same model in a loop of plain PyTorch. For ``tridock bench`` only.

No data set, no log, no schedule, no supervision: random tokens, forward, backward, clip, step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from tridock.experiment import load_experiment
from tridock.train import process_group
from tridock.train.dataset import load_splits
from tridock.train.gpt import GPT, Shape, parameter_groups
from tridock.train.strategies import DTYPES


def main() -> None:
    """Writes the median time of a step, seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    ranks = process_group.join()
    step_s = _measure(given, ranks)
    if ranks.first:
        given.out.write_text(json.dumps({"step_s": step_s}))
    process_group.leave()


def _measure(given: argparse.Namespace, ranks: process_group.Ranks) -> float:
    """In a function: DDP has to go before its process group, or the two wait for each other."""
    experiment = load_experiment(given.config, given.set).resolved(ranks.world_size)
    torch.manual_seed(experiment.train.seed)
    shape = Shape.of(experiment.model, load_splits(experiment, Path.cwd())["train"].vocab_size)
    model: nn.Module = GPT(shape).to(ranks.device)
    if experiment.train.compile:
        model.compile_layers()
    settings = experiment.optimizer
    groups = parameter_groups(model, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.adam_beta1, settings.adam_beta2), fused=True)
    if ranks.world_size > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    micro, length = experiment.batch.micro_batch_size, experiment.model.seq_length
    steps = experiment.batch.samples_per_step(ranks.world_size) // (micro * ranks.world_size)
    tokens = torch.randint(0, shape.padded_vocab_size, (steps, micro, length + 1), device=ranks.device)
    short = experiment.precision != "fp32"
    cast = torch.autocast(ranks.device.type, DTYPES[experiment.precision]) if short else nullcontext()
    times = []
    for _ in range(experiment.train.train_iters):
        began = time.monotonic()
        optimizer.zero_grad(set_to_none=False)
        for number, batch in enumerate(tokens, start=1):
            last = number == steps or not isinstance(model, nn.parallel.DistributedDataParallel)
            with nullcontext() if last else model.no_sync(), cast:
                loss = model(batch[:, :-1], batch[:, 1:])
            (loss / steps).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        optimizer.step()
        loss.item()  # the end of the step on the device
        times.append(time.monotonic() - began)
    return statistics.median(times[given.warmup :])


if __name__ == "__main__":
    main()
