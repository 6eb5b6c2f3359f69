"""The same as ``waits.py`` for Megatron-LM v1.1.5, whose patched source is in the folder given.

Counted is an iteration that logs no line, with checkpoints on: of Tridock's functions and Megatron's, not DeepSpeed's.
``synchronize`` is a wait for all work of the device, ``add_scalar`` one for a value that TensorBoard gets. What
``compat`` changes for GPUs is in place.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from tests.distributed.forks import in_a_fork
from tests.distributed.pretended_v115 import answer_cases, packed, train
from tests.distributed.waits import OWNERS, Waits
from tridock.compat import megatron_v115
from tridock.experiment import Experiment
from tridock.train.megatron_lm.record import Recorder

COUNTED = 2


class Event:
    """CUDA's, of a device that has done all its work."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.monotonic()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


def count(source: Path, workspace: Path, experiment: Experiment, world_size: int) -> bytes:
    waits = Waits((OWNERS[0], f"{source}/megatron/", f"{source}/pretrain_gpt2.py"))
    cuda: Any = torch.cuda
    cuda.Event = Event
    cuda.synchronize = lambda: waits.places.update(["synchronize"] if waits.open else [])
    writer: Any = SummaryWriter
    writer.add_scalar = lambda *_, **__: waits.places.update(["add_scalar"] if waits.open else [])
    megatron_v115.time_by_events()
    megatron_v115.clip_on_the_device()
    waits.open = False
    recorder: Any = Recorder
    step, log = recorder.train_step, recorder.training_log

    def counted(function: Any, now: bool, *given: Any) -> Any:
        waits.open = now
        with waits if now else nullcontext():
            result = function(*given)
        waits.open = False
        return result

    recorder.train_step = lambda self, *given: counted(step, self.iteration == COUNTED - 1, self, *given)
    recorder.training_log = lambda self, *given: counted(log, given[3] == COUNTED, self, *given)
    recorder.save_checkpoint = lambda *_: None
    train(source, workspace, experiment, world_size, 0, packed([]))
    return json.dumps(waits.places).encode()


def answer(source: Path, workspace: Path, experiment: Experiment, world_size: int) -> Any:
    said, found = in_a_fork(lambda: count(source, workspace, experiment, world_size))
    return json.loads(found) if found else said


if __name__ == "__main__":
    answer_cases(answer)
