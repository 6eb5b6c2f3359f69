"""The plan's memory beside what torch's memory tracker sees on a pretended GPU, in worlds of up to 512 ranks.

Attention, RMSNorm and SiLU are stand-ins for a GPU's fused kernels, which fake tensors lack: they keep what those keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from tests.unit.train.pretended_gpu import GPU, REASON
from tests.unit.train.test_on_a_gpu import Case, needs_pipeline, on_gpu
from tridock.gpus import GPUS
from tridock.layout.shape import Shape
from tridock.plan.memory import memory_of_stage, tensor_bytes

pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON)]

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
        return lambda *_, **__: None

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


def attention(queries: Tensor, keys: Tensor, values: Tensor, **_: Any) -> Any:
    return Kernel.apply(tuple(queries.shape[:-1]), True, queries, keys, values)  # type: ignore[no-untyped-call]


def rms_norm(hidden: Tensor, _: object, weight: Tensor, *__: object) -> Any:
    return Kernel.apply(tuple(hidden.shape[:-1]), False, hidden, weight)  # type: ignore[no-untyped-call]


def silu(hidden: Tensor, *_: object) -> Any:
    return Kernel.apply((), False, hidden)  # type: ignore[no-untyped-call]


KERNELS = {"scaled_dot_product_attention": attention, "rms_norm": rms_norm, "silu": silu}


@dataclass(frozen=True)
class Layout:
    """``TP2 PP2 64``: its sizes and the ranks, of which the first of ``stage`` is tracked."""

    name: str
    strategy: str = "fsdp"
    stage: int = 0
    micro_batches: int = 2
    fields: dict[str, Any] = field(default_factory=dict)

    def size(self, kind: str) -> int:
        return next((int(word.removeprefix(kind)) for word in self.name.split() if word.startswith(kind)), 1)

    @property
    def ranks(self) -> int:
        return int(self.name.split()[-1])

    @property
    def replicas(self) -> int:
        return self.ranks // self.size("TP") // self.size("PP")

    @property
    def case(self) -> Case:
        given = {
            "parallel.strategy": self.strategy,
            "parallel.tensor_model_parallel_size": self.size("TP"),
            "parallel.virtual_pipeline_model_parallel_size": self.size("VPP"),
            "batch.global_batch_size": SAMPLES * self.replicas * self.micro_batches,
        }
        if self.size("PP") > 1:
            given["parallel.pipeline_model_parallel_size"] = self.size("PP")
        return Case({**MODEL, **given, **self.fields}, self.ranks, self.stage * self.ranks // self.size("PP"))

    def __str__(self) -> str:
        given = "Llama" if self.fields == LLAMA else ""
        more = [given] if given else [f"{name.rpartition('.')[2]}={value}" for name, value in self.fields.items()]
        return " ".join([self.strategy, self.name, f"stage {self.stage}", f"{self.micro_batches} micro-batches", *more])


def tracked_and_planned(layout: Layout) -> tuple[float, float]:
    """Bytes of the second step's peak."""
    needs_pipeline(layout.case)
    with mock.patch.multiple(torch.nn.functional, **KERNELS), on_gpu(layout.case) as on:
        made, on.resumed, strategy = on.experiment, None, on.strategy
        batches = [torch.zeros(SAMPLES, 33, dtype=torch.int64, device=GPU) for _ in range(layout.micro_batches)]
        tracker: Any = MemTracker()  # type: ignore[no-untyped-call]
        tracker._mod_tracker = Unhooked()
        tracker.track_external(*getattr(strategy, "parts", None) or [strategy.model], strategy.optimizer)
        with tracker:
            strategy.step(batches, 0.1)
            tracker._peak_mem, tracker._peak_mem_snap = {}, {}
            strategy.step(batches, 0.1)
            peak = tracker.get_tracker_snapshot("peak")[GPU]["Total"]
    stage = memory_of_stage(made, layout.stage, Shape(layout.replicas, layout.micro_batches, 8), GPUS["h100-80gb"])
    return peak, tensor_bytes(stage.terms)


FP32 = {"precision": "fp32"}
AGAIN = {"model.checkpoint_activations": True}
ONCE = {"parallel.reduce_gradients_once": True}
LLAMA = {
    "model.normalization": "RMSNorm",
    "model.swiglu": True,
    "model.position_embedding_type": "rope",
    "model.num_query_groups": 4,
    "model.add_bias_linear": False,
    "model.untie_embeddings_and_output_weights": True,
}
LAYOUTS = [
    *(Layout(f"{ranks}", "ddp", micro_batches=steps, fields=fields)
      for ranks in (2, 512) for steps in (1, 2) for fields in ({}, FP32, AGAIN)),
    *(Layout(f"{ranks}", micro_batches=steps) for ranks in (2, 8, 64, 512) for steps in (1, 2)),
    *(Layout("8", fields=fields) for fields in (FP32, AGAIN, ONCE, LLAMA)),
    *(Layout("64", fields={"parallel.data_parallel_shard_size": size} | more)
      for size in (8, 16) for more in ({}, AGAIN)),
    *(Layout(name, "ddp", fields=fields) for name in ("TP2 2", "TP4 8") for fields in ({}, AGAIN, LLAMA)),
    *(Layout(name) for name in ("TP2 16", "TP8 64", "TP8 512")),
    *(Layout(f"PP{stages} {stages}", "ddp", stage, 4) for stages in (2, 4) for stage in (0, stages - 1)),
    *(Layout("PP2 2", "ddp", stage, 4, {"parallel.pipeline_schedule": "gpipe"}) for stage in (0, 1)),
    *(Layout("PP2 VPP2 2", "ddp", stage, 4) for stage in (0, 1)),
    *(Layout("PP2 16", "fsdp", stage, 4) for stage in (0, 1)),
    *(Layout(name, "fsdp", stage, 4) for name in ("TP2 PP2 64", "TP4 PP4 512") for stage in (0, 1)),
    Layout("TP4 PP4 512", "fsdp", 3, 8, LLAMA),
]  # fmt: skip
OF_EVERY_EDIT = ("fsdp 8 stage 0 2 micro-batches", "fsdp TP2 PP2 64 stage 1 4 micro-batches")


def marked(layout: Layout) -> Any:
    return pytest.param(layout, id=str(layout), marks=() if str(layout) in OF_EVERY_EDIT else pytest.mark.full)


@pytest.mark.parametrize("layout", [marked(one) for one in LAYOUTS])
def test_what_the_tracker_sees(layout: Layout) -> None:
    peak, planned = tracked_and_planned(layout)
    assert planned == pytest.approx(peak, rel=0.05)


def test_every_edit_sees_some() -> None:
    assert len(LAYOUTS) >= 50
    assert set(OF_EVERY_EDIT) <= {str(one) for one in LAYOUTS}
