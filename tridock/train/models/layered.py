"""The common part of engine ``torch``'s models: layers, and initial weights drawn module by module."""

import copy
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class LayeredModel(nn.Module):
    """A model built on the meta device, without weights; :func:`draw_weights` draws them."""

    layers: nn.ModuleDict
    given_weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    """Returns each weight with its name, to use instead of random ones; missing rows become zeros."""

    def initialize(self, name: str, module: nn.Module) -> bool:
        """Initializes a module if torch would do it differently; returns whether it did."""
        raise NotImplementedError

    def compile_layers(self) -> None:
        """Compiles each layer when it first runs."""
        raise NotImplementedError

    def initialize_modules(self) -> None:
        for name, module in self.named_modules():
            self.initialize(name, module)


def draw_weights(model: LayeredModel, take: Callable[[str, Tensor], None]) -> None:
    """Calls ``take`` with the name and the value, on the CPU, of each parameter and buffer of a whole model.

    The values are those that the constructor would draw on the CPU. Only one module's tensors exist at a time.
    """
    if model.given_weights is not None:
        for name, value in model.given_weights():
            take(name, with_rows(value, model.get_parameter(name).shape[0]))
        return
    # The constructor of a model runs those of all its modules before `initialize_modules`.
    for is_second_draw in (False, True):
        for name, module in model.named_modules():
            if module._parameters or module._buffers:
                _draw_module(model, name, module, is_second_draw, take)


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Returns the tensor with ``rows`` rows; added ones are zeros."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing > 0 else tensor


def _draw_module(
    model: LayeredModel, name: str, module: nn.Module, is_second_draw: bool, take: Callable[[str, Tensor], None]
) -> None:
    is_drawn_again = model.initialize(name, _without_values(module, "meta"))
    if is_second_draw and not is_drawn_again:
        return
    whole = _without_values(module, "cpu")
    if is_second_draw:
        model.initialize(name, whole)
    else:
        whole.reset_parameters()  # type: ignore[operator]
    if is_drawn_again == is_second_draw:
        prefix = f"{name}." if name else ""
        for key, value in _own_tensors(whole):
            if value is not None:
                take(prefix + key, value)


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    return chain(module._parameters.items(), module._buffers.items())


def _without_values(module: nn.Module, device: str) -> nn.Module:
    """Returns a copy of a module without its children; its tensors are uninitialized, and fp32 if floating."""
    made = copy.copy(module)
    for field in ("_parameters", "_buffers"):
        tensors = getattr(module, field).items()
        made.__dict__[field] = {key: None if one is None else _empty(one, device) for key, one in tensors}
    return made


def _empty(tensor: Tensor, device: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype, device=device)


@torch.no_grad()
def fill(parts: Iterable[nn.Module], model: LayeredModel) -> None:
    """Copies the initial weights of ``model`` to this rank's ``parts`` of it: whole, staged or sharded."""
    tensors = [dict(chain(part.named_parameters(), part.named_buffers())) for part in parts]

    def take(name: str, whole: Tensor) -> None:
        for mine in tensors:
            if name in mine:
                _copy_share(mine[name], whole)

    draw_weights(model, take)


def _copy_share(mine: Tensor, whole: Tensor) -> None:
    if not isinstance(mine, DTensor):
        mine.copy_(whole)
        return
    lengths, starts = compute_local_shape_and_global_offset(whole.shape, mine.device_mesh, mine.placements)
    share = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    mine.to_local().copy_(whole[share])
