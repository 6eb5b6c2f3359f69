"""One rank that trains four steps and reports the memory that it used; the process has imported the engine already."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from tests.memory.ledger import Ledger, Place, Saved, key_of
from tests.memory.state import count, parameters_of
from tridock.experiment import Experiment

Step = Callable[[], Any]


def prepare(engine: str, ranks: int) -> None:
    """Imports what the engine needs, before the process forks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if engine == "megatron-core":
        from tridock.compat import megatron_core

        megatron_core.prepare("cpu", ranks)
        import tridock.train.megatron_core.strategy
    else:
        import deepspeed.runtime.pipe.engine  # noqa: F401

        import tridock.train.megatron_lm.record
    import tridock.train.trainer  # noqa: F401

    gc.freeze()  # what is imported stays as it is, in memory that all ranks share


class Measure:
    """Around the steps of a run.

    The first makes the optimizer's state. What lives after it is persistent. The second counts what is saved for the
    backward pass, the third the peak, without the hooks of the second, and the fourth looks at what lives there.
    """

    steps = 4

    def __init__(self) -> None:
        self.place = Place()
        self.ledger = Ledger(self.place)
        self.step = 0
        self.result: dict[str, Any] = {}
        self.saved: list[str] = []
        self.at_peak: list[str] = []

    def around(self, step: Step, models: list[nn.Module], roots: dict[str, Any]) -> Any:
        """The step, measured according to its number."""
        self.step += 1
        gc.collect()
        return (step, self._saved, self._peak, self._look)[self.step - 1](*(step, models, roots)[: 3 * (self.step > 1)])

    def _saved(self, step: Step, models: list[nn.Module], roots: dict[str, Any]) -> Any:
        for model in models:
            self.place.name(model)
        self.result = count(models, roots, self.ledger)
        # By entry: where a storage dies, another may come to lie.
        persistent, entries = dict(self.ledger.entries), self.ledger.entries

        def is_state(key: int) -> bool:
            known = key in persistent and entries.get(key) is persistent[key]
            return known or key in {key_of(parameter) for parameter in parameters_of(models)}  # ZeRO 3 gathers them

        saved = Saved(is_state, self.place)
        with self.place.followed(), saved.counted(), _stored_by_deepspeed(saved):
            given = step()
        self.result["saved_peak"] = saved.peak
        self.result["saved_at_first_backward"] = saved.at_first_backward
        self.saved = [f"{number} x {' | '.join(kind)}" for kind, number in saved.kinds.items()]
        return given

    def _peak(self, step: Step, *_: Any) -> Any:
        before = self.ledger.restart()
        given = step()
        self.result["live_before_step"] = before
        self.result["step_peak"] = self.ledger.peak - before
        self.ledger.look_at = self.ledger.peak_at
        return given

    def _look(self, step: Step, *_: Any) -> Any:
        before = self.ledger.restart()
        persistent = dict(self.ledger.entries)
        sizes = {key: entry.bytes for key, entry in persistent.items()}
        with self.place.followed():
            given = step()
        looked = self.ledger.looked
        now = {key: size for key, (entry, size) in looked.items() if persistent.get(key) is not entry}
        self.at_peak = [f"{size} | {looked[key][0].made_by}" for key, size in now.items()]
        freed = sum(size for key, size in sizes.items() if looked.get(key, (None,))[0] is not persistent[key])
        grown = sum(size - sizes[key] for key, (_, size) in looked.items() if key in sizes and key not in now)
        summed = f"{sum(now.values())} in all, {grown} more in what lived before, less {freed} of it freed by now"
        self.at_peak.append(f"{summed}; peak {self.ledger.peak - before}")
        return given


@contextmanager
def _stored_by_deepspeed(saved: Saved) -> Iterator[None]:
    """Counts the inputs that DeepSpeed's checkpointing keeps by itself, not in the graph."""
    if "deepspeed" not in sys.modules:
        yield
        return
    from deepspeed.runtime.activation_checkpointing.checkpointing import CheckpointFunction

    def store(node: Any, tensors: Any) -> None:
        node.stored = tensors
        node.counted = [] if tensors is None else [saved.pack(tensor) for tensor in tensors]

    kind = CheckpointFunction._backward_cls
    kind.deepspeed_saved_tensors = property(lambda node: node.stored, store)
    yield
    del kind.deepspeed_saved_tensors


def train(experiment: Experiment, folder: Path) -> Measure:
    """Engines torch and megatron-core."""
    from tridock.train import trainer
    from tridock.train.rank import process_group

    measure, ranks = Measure(), process_group.join()
    build = trainer.torch_parts
    if experiment.engine == "megatron-core":
        from tridock.train.megatron_core.strategy import megatron_core_parts as build
    with measure.ledger:
        run = trainer.Trainer(experiment, folder, folder.parent.parent, ranks, build)
        models, roots = _parts(run.strategy)
        for iteration in range(1, measure.steps + 1):
            measure.around(lambda at=iteration: run.step(at), models, roots)
    return measure


def _parts(strategy: Any) -> tuple[list[nn.Module], dict[str, Any]]:
    """The models of a strategy, and the objects that reach all that it holds."""
    if hasattr(strategy, "chunks"):
        from megatron.core.parallel_state import get_global_memory_buffer

        return strategy.chunks, {"memory_buffer": get_global_memory_buffer(), "strategy": strategy}
    if hasattr(strategy, "parts"):
        return strategy.parts, {"strategy": strategy}
    return [strategy.engine.module if hasattr(strategy, "engine") else strategy.model], {"strategy": strategy}


def train_megatron(arguments: list[str]) -> Measure:
    """Engine megatron-deepspeed, whose own program runs."""
    from tridock.train.megatron_lm import pretrain_gpt2
    from tridock.train.megatron_lm.record import Recorder

    measure, step = Measure(), Recorder.train_step

    def measured(recorder: Recorder, forward: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
        return measure.around(
            lambda: step(recorder, forward, iterator, model, optimizer, scheduler),
            [model],
            {"model": model, "optimizer": optimizer},
        )

    Recorder.train_step = measured
    sys.argv = ["megatron_deepspeed", *arguments]
    with measure.ledger:
        code = pretrain_gpt2.main()
    assert code == 0, f"exit code {code}"
    return measure
