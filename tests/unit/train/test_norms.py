"""What RMSNorm keeps for the backward pass in torch 2.6, the torch of base image 24.12 (``make test-torch``)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from tridock.experiment.model import Model
from tridock.layout.activations import norm_bytes

ROWS, WIDTH = 128, 64


@pytest.mark.skipif(hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has a kernel for it, on GPUs")
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="keeps less in fp16 and bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_without_a_kernel_keeps_4_bytes_more_for_each_element(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(WIDTH).to(dtype)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != norm.weight.data_ptr():
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(torch.randn(ROWS, WIDTH).to(dtype).requires_grad_())
    model = Model(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, seq_length=8, normalization="RMSNorm")
    fused = norm_bytes(model, ROWS, WIDTH, dtype.itemsize, "cuda")
    assert sum(kept.values()) == fused + 4 * ROWS * WIDTH
