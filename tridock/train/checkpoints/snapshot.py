"""Copies a state to the host's memory, to be written while training continues.

torch's own ``torch.distributed.checkpoint.staging`` copies nothing on CPU ranks in torch 2.6, and does not preserve
shared storages.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tridock.train.checkpoints.write_errors import defer_write_errors, replaced

Write = Callable[[], None]
"""Writes a rank's part of a checkpoint."""


def tensor_on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in the host's memory, from a GPU pinned and asynchronous: call :func:`wait_for_copies` first."""
    source = tensor.detach()
    host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
    return host.copy_(source, non_blocking=True)


def wait_for_copies() -> None:
    """Waits for the copies of :func:`tensor_on_host` from this GPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def state_on_host(state: Any) -> Any:
    """Returns a deep copy whose tensors share storages as the originals do: torch.save writes the same bytes."""
    with replaced(Tensor, "__deepcopy__", _copied), replaced(nn.Parameter, "__deepcopy__", _copied):
        copied = copy.deepcopy(state)
    wait_for_copies()
    return copied


def _copied(tensor: Tensor, memo: dict[object, Any]) -> Tensor:
    if isinstance(tensor, DTensor):
        return DTensor(_copied(tensor.to_local(), memo), tensor._spec, requires_grad=False)
    storage = tensor.untyped_storage()
    key = (storage.device, storage.data_ptr(), storage.nbytes())
    if key not in memo:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        memo[key] = tensor_on_host(whole).untyped_storage()
    found = torch.empty(0, dtype=tensor.dtype).set_(memo[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)


def write_by_torch_save(save: Callable[[], object], *places: tuple[Any, str], from_copy: bool) -> Write:
    """Returns the function that writes the objects which ``save`` passes to torch.save: ``from_copy``, or as they are.

    ``save`` may be a collective. Write errors in it and in the functions ``(owner, name)`` are raised at its end.
    """
    if not from_copy:
        return partial(_deferring, save, (torch, "save"), *places)
    writes: list[Write] = []
    original = torch.save

    def record(state: Any, file: Any, **named: Any) -> None:
        writes.append(partial(original, state_on_host(state), file, **named))

    with replaced(torch, "save", record):
        _deferring(save, *places)

    def write() -> None:
        for one in writes:
            one()

    return write


def _deferring(save: Callable[[], object], *places: tuple[Any, str]) -> None:
    with defer_write_errors(*places):
        save()
