"""The bytes that the kernels of a layer move, counted while it runs, against what the planner's times assume."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.experiments import with_fields
from tridock.engines.torch.cost_model import TorchCostModel
from tridock.experiment import Experiment
from tridock.layout.compute_time import between_bytes
from tridock.train.models.gpt import Layer, rotation

_BASE: dict[str, Any] = {"name": "layer", "engine": "torch", "data": {"data_path": "data/x"}}
_FIELDS: dict[str, Any] = {
    "precision": "bf16",
    "train.train_iters": 1,
    "model.num_layers": 2,
    "model.hidden_size": 512,
    "model.num_attention_heads": 8,
    "model.seq_length": 1024,
    "model.vocab_size": 50304,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "batch.global_batch_size": 2,
    "batch.micro_batch_size": 2,
}
_LLAMA: dict[str, Any] = {
    "model.position_embedding_type": "rope",
    "model.swiglu": True,
    "model.add_bias_linear": False,
    "model.ffn_hidden_size": 1536,
}


class Moved(TorchDispatchMode):
    """Counts what every kernel reads and writes, except views, matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not (func.is_view or name in ("mm", "addmm", "_unsafe_view", "detach") or "dot_product" in name):
            tensors = (it for it in tree_leaves((args, kwargs, made)) if isinstance(it, Tensor))
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return made


def moved(experiment: Experiment) -> tuple[int, int]:
    """Returns the bytes of a layer's forward and backward pass, with the formats of the strategy."""
    model, batch = experiment.model, experiment.batch.micro_batch_size
    autocast = experiment.parallel.strategy == "ddp"
    dtype = torch.float32 if autocast else torch.bfloat16
    layer = Layer(model).to(dtype)
    x = torch.randn(batch, model.seq_length, model.hidden_size, dtype=dtype, requires_grad=True)
    by = rotation(model, model.seq_length, x.device) if model.position_embedding_type == "rope" else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Moved() as forward:
        y = layer(x, by)
    with Moved() as backward:
        y.backward(torch.ones_like(y))
    return forward.bytes, backward.bytes


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"parallel.strategy": "fsdp"}, id="fsdp", marks=pytest.mark.full),
        pytest.param({"parallel.strategy": "ddp"}, id="ddp, autocast"),
        pytest.param({**_LLAMA, "parallel.strategy": "fsdp"}, id="fsdp, rope and SwiGLU", marks=pytest.mark.full),
        pytest.param({**_LLAMA, "parallel.strategy": "fsdp", "model.num_query_groups": 2}, id="fsdp, grouped queries"),
        pytest.param(
            {**_LLAMA, "parallel.strategy": "fsdp", "model.rotary_percent": 0.5},
            id="fsdp, half rotated",
            marks=pytest.mark.full,
        ),
        pytest.param({**_LLAMA, "parallel.strategy": "ddp"}, id="ddp, rope and SwiGLU", marks=pytest.mark.full),
    ],
)
def test_a_layer_moves_what_the_planner_counts(fields: dict[str, Any]) -> None:
    if "model.num_query_groups" in fields and TorchVersion(torch.__version__) < "2.7":
        pytest.skip("its fused kernel for CPUs takes no grouped queries")
    experiment = with_fields(_BASE, {**_FIELDS, **fields})
    planned = between_bytes(experiment, TorchCostModel().sizes(experiment, "cuda"), fuses_rotation=False)
    counted = moved(experiment)
    assert counted == (pytest.approx(planned[0], rel=0.13), pytest.approx(planned[1], rel=0.13))
    assert sum(counted) == pytest.approx(sum(planned), rel=0.07)


def rms_norm(x: Tensor, _: object, weight: Tensor, eps: float | None = None) -> Tensor:
    """As torch 2.6 computes it on GPUs, operation by operation (``aten/src/ATen/native/layer_norm.cpp``)."""
    whole = x.float()
    inverse = whole.pow(2).mean(-1, keepdim=True).add(eps or 1e-6).rsqrt()
    return whole.mul(inverse).type_as(x).mul(weight)


@pytest.mark.full
def test_norms_without_a_kernel() -> None:
    fields = {**_FIELDS, **_LLAMA, "parallel.strategy": "fsdp", "model.normalization": "RMSNorm"}
    experiment = with_fields(_BASE, fields)
    with mock.patch.object(torch.nn.functional, "rms_norm", rms_norm):
        counted = moved(experiment)
    sizes = TorchCostModel().sizes(experiment, "cuda")
    planned = between_bytes(experiment, sizes, fuses_rotation=False, stepwise_norms=True)
    assert counted == (pytest.approx(planned[0], rel=0.13), pytest.approx(planned[1], rel=0.13))
    assert sum(planned) > 1.5 * sum(between_bytes(experiment, sizes, fuses_rotation=False))
