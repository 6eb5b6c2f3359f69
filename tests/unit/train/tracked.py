"""What torch's memory tracker sees of a training step on a pretended GPU.

Attention, RMSNorm and SiLU are stand-ins for a GPU's fused kernels, which fake tensors lack: they keep what those keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.train.pretended_gpu import GPU
from tests.unit.train.test_on_a_gpu import Case
from tridock.experiment import Experiment
from tridock.gpus import GPUS
from tridock.layout.shape import LayoutShape
from tridock.plan.memory import memory_of_stage, tensor_bytes

SAMPLES = 32
MODEL: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 8,
    "model.seq_length": 32,
    "model.vocab_size": 96,
    "batch.micro_batch_size": SAMPLES,
}


class Unhooked:
    """In the place of the tracker of modules, for which each may run only once in a step, and autograd.grad never."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: "" if name == "get_known_fqn" else None

    def __enter__(self) -> Unhooked:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Kernel(torch.autograd.Function):
    """A kernel as a GPU has it, where fake tensors take its parts: what it keeps besides its inputs, and its output."""

    @staticmethod
    def forward(context: Any, rows: tuple[int, ...], keeps_output: bool, *inputs: Tensor) -> Tensor:
        output = torch.empty_like(inputs[0])
        kept = [output] if keeps_output else []
        if rows:
            kept.append(output.new_empty(rows, dtype=torch.float32))
        context.count = len(inputs)
        context.save_for_backward(*inputs, *kept)
        return output

    @staticmethod
    def backward(context: Any, *_: Tensor) -> Any:
        return None, None, *(torch.empty_like(tensor) for tensor in context.saved_tensors[: context.count])


def attention(queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Any:
    return Kernel.apply(tuple(queries.shape[:-1]), True, queries, keys, values)  # type: ignore[no-untyped-call]


def rms_norm(hidden: Tensor, _: object, weight: Tensor, *__: object) -> Any:
    return Kernel.apply(tuple(hidden.shape[:-1]), False, hidden, weight)  # type: ignore[no-untyped-call]


def silu(hidden: Tensor, *_: object) -> Any:
    return Kernel.apply((), False, hidden)  # type: ignore[no-untyped-call]


KERNELS = {"scaled_dot_product_attention": attention, "rms_norm": rms_norm, "silu": silu}


FP32 = {"precision": "fp32"}
AGAIN = {"model.checkpoint_activations": True}
LLAMA = {
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.num_query_groups": 4,
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
}


@dataclass(frozen=True)
class Layout:
    """``TP2 PP2 64``: its sizes and the ranks, of which one of ``stage`` is tracked: its first, or the ``nth``."""

    name: str
    strategy: str = "fsdp"
    stage: int = 0
    micro_batches: int = 2
    fields: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    """What the fields are, in the name of a test."""
    nth: int = 0

    def size(self, kind: str) -> int:
        return next((int(word.removeprefix(kind)) for word in self.name.split() if word.startswith(kind)), 1)

    @property
    def ranks(self) -> int:
        return int(self.name.split()[-1])

    @property
    def replicas(self) -> int:
        return self.ranks // self.size("TP") // self.size("PP") // self.size("CP")

    @property
    def rank(self) -> int:
        return self.stage * self.ranks // self.size("PP") + self.nth

    @property
    def case(self) -> Case:
        given = {
            "parallel.strategy": self.strategy,
            "parallel.tensor_model_parallel_size": self.size("TP"),
            "parallel.virtual_pipeline_model_parallel_size": self.size("VPP"),
            "parallel.context_parallel_size": self.size("CP"),
            "batch.global_batch_size": SAMPLES * self.replicas * self.micro_batches,
        }
        if self.size("PP") > 1:
            given["parallel.pipeline_model_parallel_size"] = self.size("PP")
        return Case({**MODEL, **given, **self.fields}, self.ranks, self.rank)

    @property
    def experiment(self) -> Experiment:
        return self.case.experiment.resolved(self.replicas)

    def batches(self) -> list[Tensor]:
        return [torch.zeros(SAMPLES, 33, dtype=torch.int64, device=GPU) for _ in range(self.micro_batches)]

    def __str__(self) -> str:
        fields = [f"{name.rpartition('.')[2]}={value}" for name, value in self.fields.items()]
        more = [self.note or "Llama"] if self.note or self.fields == LLAMA else fields
        more += [f"rank {self.rank}"] if self.nth else []
        return " ".join([self.strategy, self.name, f"stage {self.stage}", f"{self.micro_batches} micro-batches", *more])


def unhooked(tracker: Any) -> Any:
    tracker._mod_tracker = Unhooked()
    return tracker


def second_peak(tracker: Any, step: Callable[[], object]) -> float:
    """Returns the bytes of the second step's peak."""
    step()
    tracker._peak_mem, tracker._peak_mem_snap = {}, {}
    step()
    return float(tracker.get_tracker_snapshot("peak")[GPU]["Total"])


def planned(layout: Layout) -> float:
    shape = LayoutShape(layout.replicas, layout.micro_batches, 8)
    return tensor_bytes(memory_of_stage(layout.experiment, layout.stage, shape, GPUS["h100-80gb"]).terms)


def cases(layouts: Sequence[Layout], of_every_edit: str) -> list[Any]:
    """Parameters of a test: one layout always, by its name, and the others in `make test-full`."""
    assert of_every_edit in {str(layout) for layout in layouts}
    return [
        pytest.param(layout, id=str(layout), marks=() if str(layout) == of_every_edit else pytest.mark.full)
        for layout in layouts
    ]
