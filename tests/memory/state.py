"""What a rank holds between two iterations, by kind: parameters, gradients, the optimizer's state, and the rest."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.memory.ledger import Ledger, key_of

FOLLOWED = ("torch.nn", "torch.optim", "tridock", "megatron", "deepspeed", "model", "fp16", "apex")
"""Packages whose objects are looked into."""
DEPTH = 9
GRADIENTS = re.compile(
    r"(?<!input_tensor\.)grad(?!_norm|_scale|_layer|_partition_)|ipg"
    r"|by aten\.empty\.memory_format \(\d+,\) float32 in -$"
)
"""Names of what holds gradients of weights, DDP's buckets too. (A pipeline's stage also keeps those of what it sent or
received last.)"""


def named_tensors(roots: dict[str, Any]) -> dict[int, str]:
    """The storages that these objects reach, each by its shortest path of attributes, keys and numbers."""
    found: dict[int, str] = {}
    queue: deque[tuple[str, Any, int]] = deque((name, root, 0) for name, root in roots.items())
    seen: set[int] = set()
    while queue:
        path, thing, depth = queue.popleft()
        if id(thing) in seen or depth > DEPTH:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.setdefault(key_of(thing), path)
        queue.extend((f"{path}{step}", below, depth + 1) for step, below in _below(thing))
    return found


def _below(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        # An optimizer's state has parameters as keys.
        yield from ((f"[{name if isinstance(name, str | int) else ''}]", value) for name, value in thing.items())
        yield from (("[key]", name) for name in thing if isinstance(name, Tensor))
    elif isinstance(thing, list | tuple | set | deque):
        yield from ((f"[{number}]", value) for number, value in enumerate(thing))
    elif isinstance(thing, Tensor):
        if (thing.is_leaf or thing.retains_grad) and thing.grad is not None:
            yield ".grad", thing.grad
        yield from ((f".{name}", value) for name, value in vars(thing).items())
    elif type(thing).__module__.startswith(FOLLOWED) and not isinstance(thing, type):
        yield from ((f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items())


def optimizers(roots: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """All of torch's kind that these objects reach."""
    found: list[torch.optim.Optimizer] = []
    queue: deque[tuple[Any, int]] = deque((root, 0) for root in roots.values())
    seen: set[int] = set()
    while queue:
        thing, depth = queue.popleft()
        if id(thing) in seen or depth > DEPTH or isinstance(thing, Tensor):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.optim.Optimizer):
            found.append(thing)
        queue.extend((below, depth + 1) for _, below in _below(thing))
    return found


def parameters_of(models: list[nn.Module]) -> list[Tensor]:
    """Each once. Under ZeRO 3 also the rank's own parts, which stand for them."""
    own = list({id(parameter): parameter for model in models for parameter in model.parameters()}.values())
    return own + [parameter.ds_tensor for parameter in own if hasattr(parameter, "ds_tensor")]


def _elements(parameter: Tensor) -> int:
    """Of a weight as this tensor parallel rank has it, whatever part of it the rank keeps."""
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split = zip(names, parameter.device_mesh.shape, parameter.placements, strict=True)
        tensor = math.prod(size for name, size, placed in split if name == "tp" and not placed.is_replicate())
        return parameter.numel() // tensor
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def count(models: list[nn.Module], roots: dict[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The bytes that live now by kind and name; each storage in the first kind that claims it."""
    rest = {key: entry.bytes for key, entry in ledger.entries.items()}
    made_by = {key: entry.made_by for key, entry in ledger.entries.items()}

    def take(tensors: Any) -> int:
        return sum(rest.pop(key, 0) for key in {key_of(tensor) for tensor in tensors})

    own = parameters_of(models)
    elements = sum(_elements(parameter) for parameter in own if parameter.requires_grad)
    kinds: dict[str, Any] = {"parameters": {"elements": elements, "bytes": take(own)}}
    states: Counter[str] = Counter()
    masters: list[Tensor] = []
    for optimizer in optimizers(roots):
        keys = [key for key in optimizer.state if isinstance(key, Tensor)]
        masters += keys + [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients: Counter[str] = Counter()
    gradients["main_grad"] = take(parameter.main_grad for parameter in own if hasattr(parameter, "main_grad"))
    gradients["grad"] = take(parameter.grad for parameter in own if parameter.is_leaf and parameter.grad is not None)
    gradients["master_grad"] = take(master.grad for master in masters if master.is_leaf and master.grad is not None)
    states["master"] = take(masters)
    for optimizer in optimizers(roots):
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    states[name] += take([value])
    names = named_tensors(roots)
    other: Counter[str] = Counter()
    for key, size in rest.items():
        name = re.sub(r"\[\d+\]", "[]", names.get(key, f"made by {made_by[key]}"))
        (gradients if GRADIENTS.search(name) else other)[name] += size
    kinds["gradients"] = {name: size for name, size in gradients.items() if size}
    kinds["optimizer"] = {name: size for name, size in states.items() if size}
    kinds["other"] = {name: size for name, size in other.items() if size}
    return kinds
