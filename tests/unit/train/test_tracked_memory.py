"""The plan's memory beside what torch's memory tracker sees of DDP on a pretended GPU, in worlds of up to 512 ranks.

Samples are short, with wide heads: attention of fake tensors keeps its scores, which a GPU's fused kernels do not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from tests.unit.train.pretended_gpu import GPU, REASON
from tests.unit.train.test_on_a_gpu import Case, on_gpu
from tridock.gpus import GPUS
from tridock.layout.shape import Shape
from tridock.plan.memory import memory_of_stage, tensor_bytes

pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.full]

MODEL: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 2,
    "model.seq_length": 32,
    "model.vocab_size": 96,
    "batch.micro_batch_size": 32,
    "parallel.strategy": "ddp",
}


class Total(MemTracker):  # type: ignore[no-untyped-call]
    """Without the statistics of modules, for which each may run only once in a step."""

    def _ignored(self, *_: Any) -> None:
        pass

    _pre_fw_hook: Any = _ignored
    _post_fw_hook: Any = _ignored
    _pre_bw_hook: Any = _ignored
    _post_bw_hook: Any = _ignored


def tracked_and_planned(fields: dict[str, Any], ranks: int, micro_batches: int) -> tuple[float, float]:
    """Bytes of the second step's peak."""
    batch = {"batch.global_batch_size": 32 * ranks * micro_batches}
    with on_gpu(Case({**MODEL, **batch, **fields}, ranks)) as on:
        made = on.experiment
        batches = [torch.zeros(32, 33, dtype=torch.int64, device=GPU) for _ in range(micro_batches)]
        tracker = Total()
        tracker.track_external(on.strategy.model, on.strategy.optimizer)
        with tracker:
            on.strategy.step(batches, 0.1)
            tracker._peak_mem, tracker._peak_mem_snap = {}, {}
            on.strategy.step(batches, 0.1)
            peak = tracker.get_tracker_snapshot("peak")[GPU]["Total"]
    stage = memory_of_stage(made, 0, Shape(ranks, micro_batches, 8), GPUS["h100-80gb"])
    return peak, tensor_bytes(stage.terms)


@pytest.mark.parametrize(
    "fields", [{}, {"precision": "fp32"}, {"model.checkpoint_activations": True}], ids=["bf16", "fp32", "recomputed"]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_what_the_tracker_sees(fields: dict[str, Any], ranks: int, micro_batches: int) -> None:
    peak, planned = tracked_and_planned(fields, ranks, micro_batches)
    assert planned == pytest.approx(peak, rel=0.05)
