"""One of two tensor parallel ranks with the same weights: what dropout leaves of its heads, and of what both hold.

Prints one JSON object: whether the ranks agree about each, and whether recomputation and a new seed change anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tridock.experiment.model import Model
from tridock.train.models.gpt import GPT, Shape
from tridock.train.parallel.mesh_strategy import split_layers
from tridock.train.rank import process_group
from tridock.train.rank.run import end


def model(recompute: bool, mesh: object) -> GPT:
    """Dropout of attention and residual; the heads of both ranks have the same weights."""
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    dropout = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    gpt = GPT(Shape(Model(**sizes, **dropout, init_method_std=0.2, checkpoint_activations=recompute), 32))
    with torch.no_grad():
        for layer in gpt.layers.values():
            weight = layer.attention.query_key_value.weight
            weight[24:] = weight[:24]
    split_layers(gpt, mesh)
    return gpt


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def alike(tensor: Tensor) -> bool:
    """Whether both ranks have the same."""
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor.contiguous())
    return torch.equal(*both)


def passed(gpt: GPT, seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What comes out of the heads of each layer, what leaves the layers, and the gradients."""
    heads: list[Tensor] = []
    whole: list[Tensor] = []

    def note(into: list[Tensor], of: Callable[..., Tensor]) -> Callable[..., None]:
        return lambda _module, given, out: into.append(local(of(given, out)).detach())

    for layer in gpt.layers.values():
        layer.attention.dense.register_forward_hook(note(heads, lambda given, _: given[0]))
        layer.register_forward_hook(note(whole, lambda _, out: out))
    torch.manual_seed(seed)
    tokens = torch.arange(16).reshape(2, 8)
    gpt(tokens, tokens).backward()
    return heads, whole, [local(parameter.grad) for parameter in gpt.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def main() -> None:
    ranks = process_group.join()
    mesh = init_device_mesh("cpu", (2,))
    heads, whole, gradients = passed(model(False, mesh), 7)
    again, _, recomputed = passed(model(True, mesh), 7)
    other, _, _ = passed(model(False, mesh), 8)
    found = {
        "heads_alike": alike(heads[0]),
        "whole_alike": [alike(tensor) for tensor in whole],
        "recomputed_heads_same": same(again[:2], heads) and same(again[2:][::-1], heads),
        "recomputed_gradients_same": same(recomputed, gradients),
        "other_seed_same": same(other, heads),
    }
    if ranks.first:
        print(json.dumps(found), flush=True)
    process_group.leave()
    end(0, at_once=True)


if __name__ == "__main__":
    sys.exit(main())
