"""The plan's memory beside what torch's memory tracker sees of DeepSpeed's ZeRO, in worlds of up to 512 ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from tests.unit.train.pretended_gpu import REASON, Transfers, pretended_gpu
from tests.unit.train.test_on_a_gpu import deepspeed_on_gpus  # noqa: F401  a fixture
from tests.unit.train.tracked import AGAIN, FP32, KERNELS, LLAMA, Layout, cases, planned, second_peak, unhooked
from tridock.engines.deepspeed import deepspeed_config
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel import strategies

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.usefixtures("deepspeed_on_gpus")]


def zero(stage: int, ranks: int, micro_batches: int = 2, note: str = "", nth: int = 0, **fields: Any) -> Layout:
    """With DeepSpeed's default buckets, which weigh more than this model, unless ``note`` says otherwise."""
    named = {"parallel.zero_stage": stage, **(fields.pop("fields", {}))}
    if fields:
        named["deepspeed"] = {"zero_optimization": fields}
    return Layout(f"{ranks}", "zero", 0, micro_batches, named, f"ZeRO-{stage} {note}".strip(), nth)


SMALL = {"reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 4_000_000}
TABLE = {"model.vocab_size": 50304}
"""A token table as large as the layers: its gradients are most of what ranks with a part of it keep."""
UNTIED = {"model.untie_embeddings_and_output_weights": True}
DEEP = {"model.num_layers": 8}


def live(prefetched: int, gathered: int) -> dict[str, int]:
    """Limits below the size of the model, in millions of elements."""
    limits = {"stage3_prefetch_bucket_size": prefetched, "stage3_max_live_parameters": gathered}
    return {name: 1_000_000 * size for name, size in {**limits, "stage3_max_reuse_distance": 25}.items()} | {
        "reduce_bucket_size": 1_000_000
    }


LAYOUTS = [
    zero(3, 2, 1, "two layers", fields={"model.num_layers": 2}),
    *(zero(stage, ranks, steps) for stage in range(4) for ranks, steps in ((2, 2), (8, 1))),
    *(zero(stage, 512 if stage < 3 else 64) for stage in range(4)),
    *(zero(stage, 8, note=note, fields=fields)
      for stage in range(4) for note, fields in (("fp32", FP32), ("recomputed", AGAIN), ("Llama", LLAMA))),
    *(zero(stage, 8, steps, "small buckets", nth=nth, **SMALL)
      for stage, nth in ((1, 0), (2, 3), (3, 0)) for steps in (1, 2)),
    *(zero(stage, ranks, steps, f"small buckets, {note}", nth, fields=TABLE | fields, **SMALL)
      for stage, ranks, nth in ((1, 64, 20), (2, 64, 20), (3, 8, 0)) for steps in (1, 2)
      for note, fields in (("large table", {}), ("two tables", UNTIED))),
    *(zero(stage, ranks, 2, "large table", nth, fields=TABLE)
      for stage, ranks, nth in ((1, 64, 20), (2, 64, 20), (3, 8, 0))),
    *(zero(3, 8, 2, f"{kind} {gathered} of 100 million, {prefetched} together", fields=DEEP | fields,
           **live(prefetched, gathered))
      for kind, fields in (("kept", {}), ("recomputed", AGAIN)) for prefetched, gathered in ((1, 20), (10, 40))),
]  # fmt: skip
OF_EVERY_EDIT = "zero 2 stage 0 1 micro-batches ZeRO-3 two layers"


def peak_of_step(layout: Layout) -> float:
    made = layout.experiment
    shape = (made.batch.micro_batch_size, made.model.seq_length, made.model.hidden_size)
    kernels = mock.patch.multiple(torch.nn.functional, **KERNELS)
    world = pretended_gpu(layout.ranks, layout.rank, shape, strategies.DTYPES[made.precision])
    with kernels, world as (ranks, fakes):
        with torch.device("meta"):
            model = GPT(Shape.of(made.model, made.model.vocab_size or 0))
        tracker = unhooked(MemTracker())  # type: ignore[no-untyped-call]
        # DeepSpeed makes its states while it starts.
        with fakes, Transfers(on_host=1), tracker:
            strategy = strategies.Zero(model, made, ranks, deepspeed_config(made, ranks.world_size))
            batches = layout.batches()
            return second_peak(tracker, lambda: strategy.step(batches, 0.1))


@pytest.mark.parametrize("layout", cases(LAYOUTS, OF_EVERY_EDIT))
def test_what_the_tracker_sees(layout: Layout) -> None:
    assert planned(layout) == pytest.approx(peak_of_step(layout), rel=0.05)
