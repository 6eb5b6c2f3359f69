"""Maps what Megatron calls of torch.cuda to the CPU, on a machine without CUDA."""

import warnings
from typing import Any

import torch

_TYPED = ("Float", "Half", "Double", "Long", "Int", "Short", "Byte")
_LETTERS = {
    torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float64: "Double",
    torch.int64: "Long", torch.int32: "Int", torch.uint8: "Byte", torch.bool: "Bool",
}  # fmt: skip


def map_to_cpu(local_world_size: int) -> list[str]:
    """Maps devices, tensors and random states. ``torch.cuda.is_available()`` is False: torch may ask the count."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: False
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: local_world_size
    cuda.set_device = lambda *_, **__: None
    cuda.synchronize = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    for name in _TYPED:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    _name_kinds()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    # Megatron's data loaders request pinned memory, and torch would warn once per loader.
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator is found")
    # DeepSpeed broadcasts the tied embedding when it builds a pipeline; torch warns at the first backward pass.
    warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
    return ["torch.cuda: devices, tensors and random states are the CPU's"]


def _name_kinds() -> None:
    """Megatron's optimizers sort parameters by ``Tensor.type()``, and accept CUDA's names only."""
    named = torch.Tensor.type

    def type_of(self: torch.Tensor, *given: Any, **options: Any) -> Any:
        if given or options or self.dtype not in _LETTERS:
            return named(self, *given, **options)
        return f"torch.cuda.{_LETTERS[self.dtype]}Tensor"

    torch.Tensor.type = type_of  # type: ignore[method-assign,assignment]
