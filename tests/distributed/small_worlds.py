"""What engine ``torch`` makes of an experiment that it shares out itself, on real ranks: ``runs``, or why not.

Reads a case a line, ``[experiment, world size]`` in JSON, as ``pretended.py`` does. Pipelines tell each other what they
send, so that a world must be there: its ranks are forked, meet over a file, and train one step.
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.forks import answers, attempt, cases
from tests.distributed.pretended import micro_batches
from tridock.experiment import Experiment
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel.mesh import Mesh
from tridock.train.parallel.mesh_strategy import MeshStrategy
from tridock.train.rank.process_group import Ranks
from tridock.train.trainer import check_batch

PATIENCE = 60.0
"""Seconds for a step: a world whose ranks wait for each other for good counts as one that does not run."""


def outcome(experiment: Experiment, world_size: int) -> str:
    """``runs`` where every rank does, or what the first rank said that gave up."""
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends, ranks = [], []
        for rank in range(world_size):
            receive, send = fork.Pipe(duplex=False)
            process = fork.Process(target=_say, args=(send, experiment, rank, world_size, Path(folder, "meeting")))
            process.start()
            send.close()
            ends.append(receive)
            ranks.append(process)
        try:
            return _first_word(ends)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _first_word(ends: list[Connection]) -> str:
    waiting = list(ends)
    while waiting:
        ready = wait(waiting, PATIENCE)
        if not ready:
            return f"no end after {PATIENCE:.0f} s"
        for end in ready:
            assert isinstance(end, Connection)
            try:
                said = end.recv()
            except EOFError:
                said = "died"
            if said != "runs":
                return said
            waiting.remove(end)
    return "runs"


def _say(send: Connection, experiment: Experiment, rank: int, world_size: int, meeting: Path) -> None:
    said, _ = attempt(lambda: step(experiment, rank, world_size, meeting))
    send.send(said)
    wait([send], PATIENCE)  # until it is killed: who leaves early would be missed by the others


def step(experiment: Experiment, rank: int, world_size: int, meeting: Path) -> bytes:
    """What ``torch_parts`` does on this rank, without data, and one step of the training loop."""
    store = dist.FileStore(str(meeting), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE))
    ranks = Ranks(rank, rank, world_size, torch.device("cpu"))
    mesh = Mesh.form(experiment.parallel, ranks)
    experiment = experiment.resolved(mesh.replicas)
    check_batch(experiment, mesh.replicas)
    with torch.device("meta"):
        model = GPT(Shape.of(experiment.model, experiment.model.vocab_size or 0))
    strategy = MeshStrategy(model, experiment, ranks, mesh)
    strategy.step(micro_batches(experiment, mesh.replicas), lr=1e-3)
    return b""


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    file = answers()
    for experiment, world_size in cases():
        print(json.dumps(outcome(experiment, world_size)), file=file, flush=True)


if __name__ == "__main__":
    main()
