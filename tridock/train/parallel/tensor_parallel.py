"""Layers that several ranks share: the heads of the attention, the width of the MLP, the rows of the vocabulary."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from tridock.train.models.gpt import GPT


def share_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Splits the model's weights over the ranks of ``mesh``, as Megatron does (Shoeybi et al., 2019)."""
    for layer in model.layers.values():
        layer.attention.tensor_parallel_rank = mesh.get_local_rank()
        parallelize_module(
            layer,
            mesh,
            {
                "attention.query_key_value": ColwiseParallel(),
                "attention.dense": RowwiseParallel(),
                "dense_h_to_4h": ColwiseParallel(),
                "dense_4h_to_h": RowwiseParallel(),
            },
        )
    if model.is_first or model.is_last:
        parallelize_module(model, mesh, {"token_embedding": RowwiseParallel(input_layouts=Replicate())})


def loss_of_parts(size: int) -> AbstractContextManager[None]:
    """Inside, the loss and its gradient are computed from the parts of the vocabulary that the ranks hold."""
    return loss_parallel() if size > 1 else nullcontext()
