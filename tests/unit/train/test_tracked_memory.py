"""The plan's memory beside what torch's memory trackers see of engine torch, in worlds of up to 512 ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from tests.unit.train.pretended_gpu import REASON
from tests.unit.train.test_on_a_gpu import needs_pipeline, on_gpu
from tests.unit.train.tracked import AGAIN, FP32, KERNELS, LLAMA, Layout, cases, planned, second_peak, unhooked

pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON)]

ONCE = {"parallel.reduce_gradients_once": True}
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
OF_EVERY_EDIT = "fsdp 8 stage 0 2 micro-batches"
SHARDED_OF_EVERY_EDIT = "fsdp 2 stage 0 1 micro-batches"
SHARDED = [layout for layout in LAYOUTS if layout.strategy == "fsdp" and layout.size("PP") == 1]
"""Those of one FSDP2 model, which torch's second tracker can follow."""


def peak_of_step(layout: Layout, of_fsdp: bool) -> float:
    needs_pipeline(layout.case)
    with mock.patch.multiple(torch.nn.functional, **KERNELS), on_gpu(layout.case) as on:
        on.resumed, strategy = None, on.strategy
        if of_fsdp:
            tracker = unhooked(FSDPMemTracker(*strategy.parts, strategy.optimizer))
        else:
            tracker = unhooked(MemTracker())  # type: ignore[no-untyped-call]
            tracker.track_external(*getattr(strategy, "parts", None) or [strategy.model], strategy.optimizer)
        batches = layout.batches()
        with tracker:
            return second_peak(tracker, lambda: strategy.step(batches, 0.1))


@pytest.mark.parametrize("layout", cases(LAYOUTS, OF_EVERY_EDIT))
def test_what_the_tracker_sees(layout: Layout) -> None:
    assert planned(layout) == pytest.approx(peak_of_step(layout, of_fsdp=False), rel=0.05)


@pytest.mark.parametrize("layout", cases(SHARDED, SHARDED_OF_EVERY_EDIT))
def test_what_the_tracker_of_fsdp_sees(layout: Layout) -> None:
    assert planned(layout) == pytest.approx(peak_of_step(layout, of_fsdp=True), rel=0.05)


def test_there_are_fifty_layouts() -> None:
    assert len(LAYOUTS) >= 50
