"""A model of Megatron v1.1.5 with upstream's own attention, and as ``tridock.compat`` adapts it.

Reads Megatron's command line as JSON. Prints both losses, and the largest difference of a gradient over the largest
gradient.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.distributed.counted import model_of_v115, prepare_v115
from tridock.train.rank.process_group import Ranks


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # Megatron prints much
    argv = json.loads(sys.stdin.readline())
    prepare_v115()
    model = model_of_v115(Ranks(0, 0, 1, torch.device("cpu")), argv)
    layer: Any = importlib.import_module("megatron.model.transformer").ParallelSelfAttention
    adapted, upstream = layer.forward, layer.forward.__wrapped__
    tokens = torch.randint(90, (2, 17), generator=torch.Generator().manual_seed(1))
    masks: Callable[..., Any] = importlib.import_module("megatron.utils").get_ltor_masks_and_position_ids
    mask, _, places = masks(tokens[:, :-1].contiguous(), 0, False, False, False)

    def trained(forward: Callable[..., Any]) -> tuple[float, list[Tensor]]:
        layer.forward = forward
        model.zero_grad()
        loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        return loss.item(), [weight.grad for weight in model.parameters() if weight.grad is not None]

    (ours, mine), (theirs, others) = trained(adapted), trained(upstream)
    far = max((one - other).abs().max() for one, other in zip(mine, others, strict=True))
    found = {"losses": [ours, theirs], "gradient": (far / max(one.abs().max() for one in others)).item()}
    os.write(answers, f"{json.dumps(found)}\n".encode())


if __name__ == "__main__":
    main()
