"""Runs megatron-core on a machine without CUDA, although its code uses the device ``cuda`` and CUDA streams.

Call it before megatron-core is imported: it decorates functions and binds torch's names at import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from tridock.compat import cuda

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like")


def prepare(device_type: str, local_world_size: int) -> list[str]:
    """Replaces what this machine lacks; returns a line for each replacement."""
    _quiet()
    if device_type == "cuda":
        return []
    replaced = cuda.map_to_cpu(local_world_size)
    _map_devices()
    _map_streams()
    torch_compile, torch.compile = torch.compile, _as_written  # type: ignore[assignment]
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    torch.compile = torch_compile
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _counts
    _map_uneven()
    return [
        *replaced,
        "torch.cuda: the device cuda is the CPU, streams do nothing; torch.compile leaves Megatron alone",
    ]


def _quiet() -> None:
    """Silences warnings that say nothing about the run: once per rank at every start, or at every dropout."""
    for message in ("Transformer Engine and Apex are not", "Apex is not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message)
    for message in ("`load_state_dict` is", r"`torch.distributed.(reduce_scatter|all_gather_into)_tensor` is"):
        warnings.filterwarnings("ignore", message=f"{message} deprecated", category=FutureWarning)
    for name in ("megatron.core.datasets", "megatron.core.tensor_parallel.random"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _as_written(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Replaces ``torch.compile`` while Megatron decorates its functions: there may be no compiler."""
    return function if function is not None else _as_written


def _counts(tokens: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001  megatron-core's
    """Returns the split sizes that megatron-core copies from a GPU; values on the host stay unchanged."""
    return tokens.numpy() if as_numpy and isinstance(tokens, torch.Tensor) else tokens


def _map_uneven() -> None:
    """Gloo gathers and scatters equal parts only; the tokens of experts on several ranks come in unequal parts."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def exchanged(parts: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        output = parts.new_empty(sum(received), *parts.shape[1:])
        torch.distributed.all_to_all_single(output, parts.contiguous(), received, sent, group=group)
        return output

    def gathered(mine: torch.Tensor, group: Any, output_split_sizes: Any = None, *others: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(mine, group, output_split_sizes, *others)
        copies = mine.repeat(group.size(), *(1 for _ in mine.shape[1:]))
        return exchanged(copies, [len(mine)] * group.size(), output_split_sizes, group)

    def scattered(parts: torch.Tensor, group: Any, input_split_sizes: Any = None, *others: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(parts, group, input_split_sizes, *others)
        sizes = [input_split_sizes[group.rank()]] * group.size()
        return torch.stack(exchanged(parts, input_split_sizes, sizes, group).split(sizes)).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gathered, scattered


def _map_devices() -> None:
    # `with torch.device("meta")` applies to the functions that torch finds by these names when it first looks.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _to_cpu(torch.Tensor.to)  # type: ignore[method-assign]


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def mapped(*given: Any, **options: Any) -> torch.Tensor:
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        return make(*given, **options)

    return mapped


def _to_cpu(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(to)
    def mapped(self: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        return to(self, *("cpu" if _is_cuda(word) else word for word in given), **options)

    return mapped


class _NoStream:
    """A stream or an event that does nothing: a CPU works in the order of the calls."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _NoStream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _map_streams() -> None:
    torch_cuda: Any = torch.cuda
    torch_cuda.Stream = torch_cuda.Event = _NoStream
    torch_cuda.current_stream = torch_cuda.default_stream = lambda *_, **__: _NoStream()
    torch_cuda.stream = lambda *_: contextlib.nullcontext()
    torch_cuda.random.get_rng_state, torch_cuda.random.set_rng_state = (
        torch_cuda.get_rng_state,
        torch_cuda.set_rng_state,
    )
    torch_cuda.nvtx.range_push = torch_cuda.nvtx.range_pop = lambda *_: None
