"""Counts bytes by storage: what lives on this rank, and what the graph holds for the backward pass.

Both count a storage once, however many views there are, and whole. They see operations of the thread that enters them,
and on a CPU the backward pass is of that thread too; what a kernel allocates and frees inside is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves


def key_of(tensor: Tensor) -> int:
    """Of its storage, while that lives; of a tensor that ranks share, of this rank's part."""
    return int(local(tensor).untyped_storage()._cdata)


def local(tensor: Tensor) -> Tensor:
    """What a tensor holds on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True)
class Entry:
    """One storage."""

    bytes: int
    made_by: str
    """The first operation that gave it, with shape and format, and the module at work."""
    watch: weakref.ref[Any]


@dataclass
class Place:
    """The module whose forward pass is running; set by hooks on all modules."""

    stack: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def name(self, model: nn.Module) -> None:
        self.names |= {id(module): name or "model" for name, module in model.named_modules()}

    @property
    def now(self) -> str:
        return self.stack[-1] if self.stack else "-"

    @contextmanager
    def followed(self) -> Iterator[None]:
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(lambda module, _: self._enter(module))
        after = hooks.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self.stack.clear()

    def _enter(self, module: nn.Module) -> None:
        self.stack.append(self.names.get(id(module), type(module).__name__))

    def _leave(self) -> None:
        self.stack.pop()


class Ledger(TorchDispatchMode):
    """Every storage that an operation has given since the ledger was entered, as long as it lives."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.entries: dict[int, Entry] = {}
        self.live = self.peak = self.peak_at = self.count = 0
        self.look_at = -1
        self.looked: dict[int, tuple[Entry, int]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        def resized(storage: torch.UntypedStorage, size: int) -> None:
            """FSDP2 gives the room of gathered weights back this way, and takes it."""
            self._resize(storage, size)
            self._note_size(int(storage._cdata), storage.nbytes())

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # what it does to the tensors inside comes by next
        given = func(*args, **(kwargs or {}))
        self.count += 1
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                self._note(leaf, func)
        self._note_peak()
        return given

    def _note(self, tensor: Tensor, func: Any) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = int(storage._cdata), storage.nbytes()
        entry = self.entries.get(key)
        if entry is None:
            made_by = f"{func} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} in {self.place.now}"
            self.entries[key] = Entry(size, made_by, weakref.ref(storage, lambda _: self._gone(key)))
            self.live += size
        else:
            self._note_size(key, size)

    def _note_size(self, key: int, size: int) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.bytes != size:
            self.live += size - entry.bytes
            entry.bytes = size
            self._note_peak()

    def _note_peak(self) -> None:
        """After each operation, and each change of a storage's size, which has no operation of its own."""
        if self.live > self.peak:
            self.peak, self.peak_at = self.live, self.count
        if self.count == self.look_at and self.live > sum(size for _, size in self.looked.values()):
            self.looked = {key: (entry, entry.bytes) for key, entry in self.entries.items()}

    def _gone(self, key: int) -> None:
        self.live -= self.entries.pop(key).bytes

    def restart(self) -> int:
        """Forgets the peak and the number of operations; gives the bytes that live now."""
        self.peak, self.count = self.live, 0
        return self.live


class Held:
    """What the graph keeps in place of a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Saved:
    """The storages that the graph holds for the backward pass, less those that are ``excluded``."""

    def __init__(self, excluded: Callable[[int], bool], place: Place) -> None:
        self.excluded, self.place = excluded, place
        self.holders: Counter[int] = Counter()
        self.live = self.peak = 0
        self.at_first_backward: int | None = None
        self.kinds: Counter[tuple[str, str, str]] = Counter()
        """(module, operation, shape and format) of what was saved, and how often; a second view of a storage too."""

    def pack(self, tensor: Tensor) -> Tensor | Held:
        """What the graph keeps. A parameter as it is: ZeRO 3 takes its content away in the meantime."""
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        key, size = key_of(tensor), local(tensor).untyped_storage().nbytes()
        held = Held(tensor)
        if self.excluded(key):
            return held
        self.holders[key] += 1
        again = self.holders[key] > 1
        if not again:
            self.live += size
            self.peak = max(self.peak, self.live)
        shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, storage {size}"
        self.kinds[(self.place.now, "again" if again else "first", shape)] += 1
        weakref.finalize(held, self._released, key, size)
        return held

    def unpack(self, held: Tensor | Held) -> Tensor:
        if self.at_first_backward is None:
            self.at_first_backward = self.live
        return held.tensor if isinstance(held, Held) else held

    def _released(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self.live -= size

    @contextmanager
    def counted(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
