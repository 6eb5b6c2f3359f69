"""Attention over a sample whose tokens lie on several ranks, without transformer-engine.

megatron-core's own attention refuses context parallelism; transformer-engine's has it, on GPUs. Here each rank gathers
the keys and values of all and attends from its own queries to those that come before them. The scores of a rank are
1 / size of the whole; keys and values, which are small beside them, are held whole while the layer works.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def positions(seq_length: int, rank: int, size: int) -> Tensor:
    """The places in the sample of the tokens that a context parallel rank holds.

    Of 2 x size equal pieces each rank has one from either end, so that all have as much to attend to: Megatron's and
    transformer-engine's way. A RuntimeError where they do not come out equal.
    """
    if size == 1:
        return torch.arange(seq_length)
    pieces = torch.arange(seq_length).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class GatheredAttention(DotProductAttention):
    """Megatron's local attention, with keys and values of the whole context."""

    def __init__(self, config: TransformerConfig, *given: Any, **named: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # the parent does nothing with it but refuse
        super().__init__(alone, *given, **named)
        self.context_parallel_size = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002  none is given: attention is causal
        attn_mask_type: AttnMaskType | None = None,
        **named: Any,
    ) -> Tensor:
        """Causal attention; tensors are [tokens of this rank, micro batch, heads of this rank, width]."""
        size, rank = self.context_parallel_size, parallel_state.get_context_parallel_rank()
        group = parallel_state.get_context_parallel_group()
        seq_length = query.size(0) * size
        mine = positions(seq_length, rank, size)
        gathered = torch.cat([positions(seq_length, other, size) for other in range(size)])
        later = (gathered[None, :] > mine[:, None]).to(query.device)
        key, value = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
        return super().forward(query, key, value, later[None, None], attn_mask_type, **named)
