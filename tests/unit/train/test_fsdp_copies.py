"""The bytes that FSDP2 copies beside its collectives, counted in a step, against what the planner's times assume."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.train.pretended_gpu import REASON
from tests.unit.train.test_on_a_gpu import on_gpu
from tests.unit.train.tracked import KERNELS, Layout
from tridock.engines.torch.cost_model import TorchCostModel
from tridock.layout.shape import LayoutShape

pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON)]


class Copied(TorchDispatchMode):
    """Counts what FSDP2's copies read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat"):
            tensors = (it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor))
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 2])
def test_copies_of_weights_and_gradients(steps: int) -> None:
    """Weights are copied out of each gathered buffer, gradients into the buffer that is scattered, in fp32."""
    layout = Layout("8", micro_batches=steps)
    with mock.patch.multiple(torch.nn.functional, **KERNELS), on_gpu(layout.case) as on:
        on.resumed, copied = None, Copied()
        with copied:
            on.strategy.step(layout.batches(), 0.1)
    weights = TorchCostModel().parameters(layout.experiment, 0).total
    moved = TorchCostModel().summed_bytes(layout.experiment, LayoutShape(8, steps, 8))
    assert copied.bytes == pytest.approx(steps * weights * moved, rel=0.001)
