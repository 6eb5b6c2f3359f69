"""The plan's memory beside what torch's memory tracker sees of megatron-core's own layers, on up to 512 ranks."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from tests.unit.train.pretended_gpu import REASON, Transfers, pretended_gpu
from tests.unit.train.tracked import FP32, KERNELS, LLAMA, Layout, cases, planned, second_peak, unhooked
from tridock.layout.shape import vocab_size

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.filterwarnings("ignore"),  # megatron-core's, of what this image lacks
]

DISTRIBUTED = {"parallel.use_distributed_optimizer": True}
SEQUENCE = {"parallel.sequence_parallel": True}
RECOMPUTED = {
    "model.recompute_granularity": "full",
    "model.recompute_method": "uniform",
    "model.recompute_num_layers": 1,
}
SELECTIVE = {"model.recompute_granularity": "selective"}


def core(name: str, stage: int = 0, micro_batches: int = 2, note: str = "", **fields: Any) -> Layout:
    own = {"engine": "megatron-core", "precision": "bf16", "model.transformer_impl": "local"}
    named = own | fields.get("fields", {})
    return Layout(name, "ddp", stage, micro_batches, named, f"megatron-core {note}".strip())


def bias_gelu(_: Tensor, hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


def bias_gelu_back(_: Tensor, __: Tensor, hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


def swiglu(hidden: Tensor) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], hidden.shape[-1] // 2))


def swiglu_back(_: Tensor, hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


FUSED = {
    "bias_gelu": {"bias_gelu": bias_gelu, "bias_gelu_back": bias_gelu_back},
    "bias_swiglu": {"swiglu": swiglu, "swiglu_back": swiglu_back},
}
"""torch.compile makes one kernel of each on a GPU."""

LAYOUTS = [
    core("TP2 2", 0, 1, "sequence, two layers", fields=SEQUENCE | {"model.num_layers": 2}),
    *(core(name, note=note, fields=fields)
      for name in ("2", "512") for note, fields in (("", {}), ("distributed", DISTRIBUTED))),
    *(core("8", note=note, fields=fields) for note, fields in
      (("fp32", FP32), ("recomputed", RECOMPUTED), ("selective", SELECTIVE), ("Llama", LLAMA))),
    *(core(name, note=note, fields=fields) for name in ("TP2 2", "TP4 8", "TP8 512") for note, fields in
      (("", {}), ("sequence", SEQUENCE), ("sequence distributed", SEQUENCE | DISTRIBUTED),
       ("sequence recomputed", SEQUENCE | RECOMPUTED))),
    *(core(name, note="Llama sequence", fields=LLAMA | SEQUENCE) for name in ("TP2 2", "TP4 8")),
    *(core(f"PP{stages} {stages}", stage, 8) for stages in (2, 4) for stage in (0, stages - 1)),
    *(core("PP2 VPP2 2", stage, 4) for stage in (0, 1)),
    *(core("TP4 PP4 512", stage, 8, "sequence distributed", fields=SEQUENCE | DISTRIBUTED) for stage in (0, 1, 3)),
    core("TP2 CP2 8", note="sequence distributed", fields=SEQUENCE | DISTRIBUTED),
]  # fmt: skip
OF_EVERY_EDIT = "ddp TP2 2 stage 0 1 micro-batches megatron-core sequence, two layers"


def peak_of_step(layout: Layout) -> float:
    from tridock.compat import megatron_core

    megatron_core.prepare("cuda", 8)
    from megatron.core.distributed import param_and_grad_buffer

    from tridock.train.megatron_core.layout import Layout as CoreLayout
    from tridock.train.megatron_core.strategy import MegatronCore

    made = layout.experiment
    # The operator for several tensors has no form for fake ones; those for one do.
    one_by_one = mock.patch.object(param_and_grad_buffer, "_coalescing_manager", return_value=nullcontext(mock.Mock()))
    kernels = mock.patch.multiple(torch.nn.functional, **KERNELS)
    with ExitStack() as stack:
        for module, functions in FUSED.items():
            stack.enter_context(mock.patch.multiple(f"megatron.core.fusions.fused_{module}", **functions))
        ranks, fakes = stack.enter_context(pretended_gpu(layout.ranks, layout.rank))
        for stand_in in (kernels, one_by_one):
            stack.enter_context(stand_in)
        groups = CoreLayout.form(made.parallel)
        tokens = vocab_size(made)
        padded = -(-tokens // (128 * layout.size("TP"))) * 128 * layout.size("TP")
        tracker = unhooked(MemTracker())  # type: ignore[no-untyped-call]
        with fakes, Transfers(on_host=1), tracker:
            groups.reseed(1, 0)
            strategy = MegatronCore(made, tokens, padded, groups, ranks)
            batches = layout.batches()
            return second_peak(tracker, lambda: strategy.step(batches, 0.1))


@pytest.mark.parametrize("layout", cases(LAYOUTS, OF_EVERY_EDIT))
def test_what_the_tracker_sees(layout: Layout) -> None:
    assert planned(layout) == pytest.approx(peak_of_step(layout), rel=0.05)
