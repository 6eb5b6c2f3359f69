"""Cross-entropy without a copy of all logits in fp32, over a vocabulary that ranks may split.

It processes rows in chunks, and the gradient overwrites the logits. As in Megatron-LM (Shoeybi et al., 2019, section
3), ranks exchange each token's largest logit, sum of exponentials, and logit of the label.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from tridock.layout.activations import LOSS_BYTES, LOSS_CHUNK_BYTES


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss over all tokens in nats, an fp32 scalar; ``logits`` may be a DTensor split along the
    vocabulary.

    The backward pass overwrites the logits with their gradient.
    """
    group, first = None, 0
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        group, first = mesh.get_group(), mesh.get_local_rank() * -(-logits.shape[-1] // mesh.size())
        logits = logits.to_local()
    return token_losses(logits.flatten(0, -2), labels.flatten(), group, first).mean()


def token_losses(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int) -> Tensor:
    """Returns the loss of each token in nats, fp32 [tokens], of logits [tokens, vocabulary], labels int64 [tokens].

    With a ``group``, each rank has the columns of the vocabulary from its own ``first`` on. The backward pass
    overwrites the logits with their gradient.
    """
    losses: Tensor = _TokenLosses.apply(logits, labels, group, first)
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int) -> Tensor:
        largest = logits.amax(-1).float()
        own = labels.unsqueeze(-1) - first
        elsewhere = None if group is None else (own < 0) | (own >= logits.shape[-1])
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            own = own.masked_fill(elsewhere, 0)
        sums = largest.new_empty(2, len(largest))  # of the exponentials, and of the label's logit, which one rank has
        for rows in _chunks(logits):
            shifted = logits[rows] - largest[rows].unsqueeze(-1)  # fp32, whatever the logits are
            sums[1, rows] = shifted.gather(-1, own[rows]).squeeze(-1)
            sums[0, rows] = shifted.exp_().sum(-1)
        if group is not None:
            sums[1].masked_fill_(elsewhere.squeeze(-1), 0.0)
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, own, elsewhere, largest + log_sum)
        return log_sum - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of a token's loss is softmax(logits) - onehot(label).
        logits, own, elsewhere, normalizer = ctx.saved_tensors
        minus = torch.full_like(own, -1, dtype=normalizer.dtype)
        if elsewhere is not None:
            minus.masked_fill_(elsewhere, 0.0)
        for rows in _chunks(logits):
            part = (logits[rows] - normalizer[rows].unsqueeze(-1)).exp_()
            logits[rows] = part.scatter_add_(-1, own[rows], minus[rows]).mul_(gradient[rows].unsqueeze(-1))
        return logits, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yields ranges of rows whose logits take up to LOSS_CHUNK_BYTES in fp32, at least one row each."""
    rows, columns = logits.shape
    size = max(1, LOSS_CHUNK_BYTES // (LOSS_BYTES * max(1, columns)))
    return (slice(start, start + size) for start in range(0, rows, size))
