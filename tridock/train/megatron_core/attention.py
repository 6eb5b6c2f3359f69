"""Attention without transformer-engine: torch's fused kernels, with context parallelism too.

megatron-core's own attention stores every score and refuses context parallelism; transformer-engine's does neither, but
needs a GPU. Under context parallelism each rank here gathers the keys and values of all ranks for the duration of the
layer, and attends from its own queries to the keys before them.
"""

import math
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def positions(seq_length: int, rank: int, size: int) -> Tensor:
    """Returns the positions in the sample of a context parallel rank's tokens, int64 [seq_length / size].

    As in Megatron and transformer-engine, the sample has 2 x size equal pieces, and each rank has one from either end,
    so that all ranks do the same work. Raises RuntimeError if the pieces are not equal.
    """
    if size == 1:
        return torch.arange(seq_length)
    pieces = torch.arange(seq_length).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


# Cached, because every layer keeps its mask for the backward pass. It has the dtype of the queries: the kernels would
# convert a boolean mask, and keep the result, for each layer.
@lru_cache(maxsize=1)
def causal_bias(seq_length: int, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the bias of a context parallel rank's scores: -inf if a key comes after the query, else 0.

    Its shape is [seq_length / size, seq_length]; the columns are in the order of the gathered keys.
    """
    mine = positions(seq_length, rank, size)
    gathered = torch.cat([positions(seq_length, other, size) for other in range(size)])
    later = gathered[None, :] > mine[:, None]
    return torch.zeros(later.shape, dtype=dtype).masked_fill_(later, -math.inf).to(device)


def _kernels(bias: Tensor | None) -> Any:
    """Leaves cuDNN's attention out under a mask: its gradients are not finite there for some lengths, on an H100
    (pytorch/pytorch#196678)."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return nullcontext() if bias is None else sdpa_kernel(kernels)


class FusedAttention(MegatronModule):
    """Causal attention by ``scaled_dot_product_attention``, in place of ``DotProductAttention`` in a layer's spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002  Megatron's signature, as all that follow
        attn_mask_type: AttnMaskType,  # noqa: ARG002
        attention_type: str,  # noqa: ARG002
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002  always None, because attention is causal
        **_: Any,
    ) -> Tensor:
        """Takes query, key and value, each [tokens of this rank, micro batch, heads of this rank, head size].

        Keys and values have a head per query group. Returns [tokens, micro batch, hidden].
        """
        bias = None
        if self.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
            bias = causal_bias(key.size(0), group.rank(), group.size(), query.dtype, query.device)
        # [tokens, micro batch, heads, width] -> [micro batch, heads, tokens, width]
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        dropout, grouped = self.dropout if self.training else 0.0, query.size(1) != key.size(1)
        with self._random_numbers(), _kernels(bias):
            mixed = F.scaled_dot_product_attention(
                query, key, value, bias, dropout, bias is None, scale=self.scale, enable_gqa=grouped
            )
        return mixed.permute(2, 0, 1, 3).contiguous().flatten(2)

    def _random_numbers(self) -> Any:
        """Forks the random state, so that tensor parallel ranks drop different elements. With sequence parallelism
        Megatron itself forks it around the layers."""
        if self.config.sequence_parallel or not self.training or self.dropout == 0.0:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()
