"""A mixture of experts on a pretended GPU, whose values nobody knows: every expert takes equally many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tridock.experiment import Experiment


@contextmanager
def balanced(experiment: Experiment) -> Iterator[None]:
    """Inside, megatron-core's dispatcher counts no tokens, and masks select as many as they would."""
    from megatron.core.transformer.moe import token_dispatcher

    model, parallel = experiment.model, experiment.parallel
    if model.num_moe_experts is None:
        yield
        return
    count, size, split = model.experts, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    select = Tensor.masked_select

    def selected(tensor: Tensor, mask: Tensor) -> Tensor:
        chosen = mask.numel() * model.moe_router_topk // count
        # Its backward pass is that of a view of as many elements.
        return tensor.expand(mask.shape).reshape(-1)[:chosen] if tensor.device.type == "cuda" else select(tensor, mask)

    def real(shape: Any, value: int) -> Tensor:
        with unset_fake_temporarily():
            return torch.full(shape, value)

    def counted(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point != self.cuda_dtoh_point:
            return tokens_per_expert if isinstance(tokens_per_expert, Tensor) else self.even
        routed = self.routing_map.shape[0] * model.moe_router_topk
        each = routed // count
        self.num_out_tokens = routed
        if size * split > 1:
            self.input_splits = self.output_splits = np.full(size, routed // size)
        if split > 1:
            self.output_splits_tp = np.full(split, routed)
        self.num_global_tokens_per_local_expert = real((size * split, self.num_local_experts), each)
        self.even = real((self.num_local_experts,), each * size * split)
        return self.even

    def sorted_chunks(tokens: Tensor, *_: Any, probs: Tensor | None = None, **__: Any) -> tuple[Tensor, Tensor | None]:
        return tokens.clone(), None if probs is None else probs.clone()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "masked_select", selected))
        stack.enter_context(mock.patch.object(token_dispatcher, "sort_chunks_by_idxs", sorted_chunks))
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        stack.enter_context(mock.patch.object(dispatcher, "_maybe_dtoh_and_synchronize", counted))
        yield
