"""Cross-entropy without a copy of all logits in fp32, over a vocabulary that ranks may split.

It processes rows in chunks, or by compiled kernels that keep nothing in fp32. The gradient overwrites the logits. As in
Megatron-LM (Shoeybi et al., 2019, section 3), ranks exchange each token's largest logit, sum of exponentials, and logit
of the label.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from tridock.layout.activations import LOSS_BYTES, LOSS_CHUNK_BYTES


def cross_entropy(logits: Tensor, labels: Tensor, *, compiled: bool = False) -> Tensor:
    """Returns the mean loss over all tokens in nats, an fp32 scalar; ``logits`` may be a DTensor split along the
    vocabulary. ``compiled``: by kernels of torch.compile.

    The backward pass overwrites the logits with their gradient.
    """
    group, first = None, 0
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        group, first = mesh.get_group(), mesh.get_local_rank() * -(-logits.shape[-1] // mesh.size())
        logits = logits.to_local()
    return token_losses(logits.flatten(0, -2), labels.flatten(), group, first, compiled=compiled).mean()


def token_losses(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int, *, compiled: bool = False
) -> Tensor:
    """Returns the loss of each token in nats, fp32 [tokens], of logits [tokens, vocabulary], labels int64 [tokens].

    With a ``group``, each rank has the columns of the vocabulary from its own ``first`` on. The backward pass
    overwrites the logits with their gradient.
    """
    losses: Tensor = _TokenLosses.apply(logits, labels, group, first, compiled)
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int, compiled: bool
    ) -> Tensor:
        largest = logits.amax(-1).float()
        own = labels.unsqueeze(-1) - first
        elsewhere = None if group is None else (own < 0) | (own >= logits.shape[-1])
        if elsewhere is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            own = own.masked_fill(elsewhere, 0)
        # Of the exponentials, and of the label's logit, which one rank has.
        sums = (_compiled(_sums) if compiled else _sums_in_chunks)(logits.detach(), largest, own)
        if elsewhere is not None:
            sums[1].masked_fill_(elsewhere.squeeze(-1), 0.0)
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        ctx.compiled = compiled
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
        differentiate = _compiled(_differentiate) if ctx.compiled else _differentiate_in_chunks
        differentiate(logits.detach(), own, minus, normalizer, gradient)
        return logits, None, None, None, None


def _sums(logits: Tensor, largest: Tensor, own: Tensor) -> Tensor:
    shifted = logits.float() - largest.unsqueeze(-1)
    return torch.stack((shifted.exp().sum(-1), shifted.gather(-1, own).squeeze(-1)))


def _sums_in_chunks(logits: Tensor, largest: Tensor, own: Tensor) -> Tensor:
    sums = largest.new_empty(2, len(largest))
    for rows in _chunks(logits):
        shifted = logits[rows] - largest[rows].unsqueeze(-1)  # fp32, whatever the logits are
        sums[1, rows] = shifted.gather(-1, own[rows]).squeeze(-1)
        sums[0, rows] = shifted.exp_().sum(-1)
    return sums


def _differentiate(logits: Tensor, own: Tensor, minus: Tensor, normalizer: Tensor, gradient: Tensor) -> None:
    probabilities = (logits.float() - normalizer.unsqueeze(-1)).exp()
    is_label = torch.arange(logits.shape[-1], device=logits.device) == own
    logits.copy_((probabilities + torch.where(is_label, minus, 0.0)) * gradient.unsqueeze(-1))


def _differentiate_in_chunks(logits: Tensor, own: Tensor, minus: Tensor, normalizer: Tensor, gradient: Tensor) -> None:
    for rows in _chunks(logits):
        part = (logits[rows] - normalizer[rows].unsqueeze(-1)).exp_()
        logits[rows] = part.scatter_add_(-1, own[rows], minus[rows]).mul_(gradient[rows].unsqueeze(-1))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function when it first runs. Torch 2.11 makes one kernel of each, without tensors in between."""
    return torch.compile(function)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yields ranges of rows whose logits take up to LOSS_CHUNK_BYTES in fp32, at least one row each."""
    rows, columns = logits.shape
    size = max(1, LOSS_CHUNK_BYTES // (LOSS_BYTES * max(1, columns)))
    return (slice(start, start + size) for start in range(0, rows, size))
