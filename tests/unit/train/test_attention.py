"""Which of torch's kernels attend in megatron-core without TransformerEngine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tridock.train.megatron_core import attention


@pytest.mark.parametrize("ranks", [1, 2])
def test_cudnns_kernel_gets_no_mask(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Its gradients under a mask are not finite for some lengths; a causal one is none."""
    used: dict[str, Any] = {}
    attend = torch.nn.functional.scaled_dot_product_attention

    def observed(query: Any, key: Any, value: Any, mask: Any, *given: Any, **named: Any) -> Any:
        flags = torch.backends.cuda
        used.update(mask=mask is not None, cudnn=flags.cudnn_sdp_enabled(), others=flags.mem_efficient_sdp_enabled())
        return attend(query, key, value, mask, *given, **named)

    group = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", lambda: group)
    gather = lambda part, group: torch.cat([part] * group.size())  # noqa: E731
    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", gather)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", observed)
    config: Any = SimpleNamespace(attention_dropout=0.0, context_parallel_size=ranks, sequence_parallel=False)
    module = attention.FusedAttention(config, 1, None, "self")  # type: ignore[arg-type]
    tokens = torch.randn(4, 1, 2, 8)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    assert module(tokens, tokens, tokens, None).shape == (4, 1, 16)
    assert used == {"mask": ranks > 1, "cudnn": before and ranks == 1, "others": True}
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
