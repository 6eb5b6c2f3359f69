"""transformer-engine without its compiled parts: its own Python code, and torch's operations for its CUDA kernels.

The stand-ins compute nothing worth knowing. They take what the kernels take, and return tensors of the same shape,
dtype and device, also where the tensors are fake ones on a pretended GPU.
"""

from __future__ import annotations

import enum
import importlib
import math
import os
import sys
import types
from collections import namedtuple
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

VERSION = "2.10.0"
"""That of NVIDIA's image 25.12."""
_TRITON = ("", ".cross_entropy", ".permutation", ".pad")
"""Kernels in Triton's language, which torch's CPU build does not come with."""


def import_transformer_engine(folder: Path) -> None:
    """Imports transformer-engine from where its wheel was unpacked. For the rest of the process it is installed."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its word for: do not load CUDA's libraries
    sys.path.append(str(folder))
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    package.__dict__["__version__"] = VERSION
    package.__spec__ = ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules |= {"transformer_engine": package, "transformer_engine_torch": Kernels("transformer_engine_torch")}
    of_torch = "transformer_engine.pytorch"
    for name in (f"{of_torch}.onnx_extensions", *(f"{of_torch}.triton{module}" for module in _TRITON)):
        sys.modules[name] = mock.MagicMock(name=name)
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    importlib.import_module(of_torch)
    _take_fake_tensors_for_tensors()


def _take_fake_tensors_for_tensors() -> None:
    """Its choice of an attention goes by the class of the queries."""
    utils: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choose = utils.get_attention_backend

    def chosen(parameters: Any) -> Any:
        parameters.qkv_type = Tensor
        return choose(parameters)

    utils.get_attention_backend = chosen


def _in_format(tensor: Tensor, quantizer: Any) -> Any:
    """A tensor of this shape, in fp8 if the quantizer is one."""
    if quantizer is None:
        return torch.zeros_like(tensor)
    return quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _shape(tensor: Any) -> Sequence[int]:
    """That of a tensor, or of the storage of a gathered one in fp8, which may have its transpose only."""
    if isinstance(tensor, Tensor):
        return tensor.shape
    if tensor._data is not None:
        return tensor._data.shape
    first, *rest = tensor._transpose.shape
    return (*rest, first)


class UserBuffer:
    """A buffer that tensor parallel ranks share; ``made`` has all of a process."""

    made: ClassVar[list[UserBuffer]] = []

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: Any, ranks: int, kind: Any = None, **options: Any
    ) -> None:
        self.shape, self.dtype, self.helper, self.ranks = tuple(shape), dtype, helper, ranks
        self.kind, self.options = kind, options
        self.made.append(self)

    def is_fp8_ubuf(self) -> bool:
        return self.dtype == torch.uint8

    def copy_into_buffer(self, tensor: Tensor, local_chunk: bool = False) -> None:
        assert tensor.element_size() == self.dtype.itemsize
        assert tensor.numel() * (self.ranks if local_chunk else 1) == math.prod(self.shape)

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> Tensor:
        rows, columns = self.shape
        found = tuple(shape or (rows // self.ranks if local_chunk else rows, columns))
        assert math.prod(found) * (self.ranks if local_chunk else 1) == rows * columns
        return torch.zeros(found, dtype=self.dtype, device="cuda")


class Kernels(types.ModuleType):
    """The module of transformer-engine's kernels; what has no stand-in is a mock."""

    FP8FwdTensors = enum.IntEnum(
        "FP8FwdTensors",
        [f"GEMM{number}_{name}" for number in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")],
        start=0,
    )
    FP8BwdTensors = enum.IntEnum(
        "FP8BwdTensors", [f"GRAD_{name}{number}" for number in (1, 2, 3) for name in ("OUTPUT", "INPUT")], start=0
    )

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # of `import *`
            return [it for it in vars(Kernels) if not it.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(name)
        found = mock.MagicMock(name=name)
        setattr(self, name, found)
        return found

    has_multicast = False
    CommOverlapType = enum.Enum("CommOverlapType", ["AG", "RS"])
    CommOverlapHelper = namedtuple("CommOverlapHelper", ["world", "domain"], defaults=[None])
    CommOverlap = CommOverlapP2P = UserBuffer

    @staticmethod
    def device_supports_multicast() -> bool:
        return Kernels.has_multicast

    @staticmethod
    def ubuf_built_with_mpi() -> bool:
        return False

    @staticmethod
    def get_stream_priority_range() -> tuple[int, int]:
        return 0, -5

    @staticmethod
    def get_cudnn_version() -> int:
        return 91700

    @staticmethod
    def get_cublasLt_version() -> int:  # noqa: N802  its name
        return 130000

    @staticmethod
    def quantize(tensor: Tensor, quantizer: Any, out: Any = None, *_: Any) -> Any:
        return _in_format(tensor, quantizer) if out is None else out

    @staticmethod
    def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
        return gradient.new_zeros(gradient.shape[-1]), _in_format(gradient, quantizer)

    @staticmethod
    def layernorm_fwd(
        x: Tensor, _weight: Tensor, _bias: Tensor, _eps: float, _out: Any, quantizer: Any, *_: Any
    ) -> tuple[Any, Tensor, Tensor]:
        rows = x.new_zeros(x.numel() // x.shape[-1], dtype=torch.float32)
        return _in_format(x, quantizer), rows, torch.zeros_like(rows)

    @staticmethod
    def layernorm_bwd(gradient: Tensor, _x: Tensor, _mean: Tensor, _deviation: Tensor, weight: Tensor, *_: Any) -> Any:
        return torch.zeros_like(gradient), torch.zeros_like(weight), torch.zeros_like(weight)

    @staticmethod
    def rmsnorm_fwd(
        x: Tensor, _weight: Tensor, _eps: float, _out: Any, quantizer: Any, *_: Any
    ) -> tuple[Any, None, Tensor]:
        return _in_format(x, quantizer), None, x.new_zeros(x.numel() // x.shape[-1], dtype=torch.float32)

    @staticmethod
    def rmsnorm_bwd(gradient: Tensor, _x: Tensor, _deviation: Tensor, weight: Tensor, *_: Any) -> Any:
        return torch.zeros_like(gradient), torch.zeros_like(weight)

    @staticmethod
    def generic_gemm(
        a: Tensor, transposed_a: bool, b: Tensor, transposed_b: bool, out: Tensor | None, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        """cuBLAS's products, by columns: ``b`` comes first."""
        _, _, bias, _, _, _, for_gradient, *_ = rest
        width = _shape(a)[0] if transposed_a else _shape(a)[-1]
        rows = [_shape(b)[-1]] if transposed_b else list(_shape(b)[:-1])
        dtype = getattr(a, "dtype", torch.bfloat16)
        made = torch.zeros(*rows, width, dtype=dtype, device="cuda") if out is None else out
        scattered = options.get("extra_output")
        return made, (torch.zeros_like(bias) if for_gradient and bias is not None else None), None, scattered

    @staticmethod
    def get_fused_attn_backend(*_: Any) -> Any:
        return sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen

    @staticmethod
    def fused_attn_fwd(*given: Any) -> list[Tensor]:
        query, value = given[13], given[15]
        tokens, samples, heads, _ = query.shape  # megatron-core's order, which transformer-engine names sbhd
        out = query.new_zeros(tokens, samples, heads, value.shape[-1])
        sums = query.new_zeros(samples, heads, tokens, 1, dtype=torch.float32)
        return [out, sums, query.new_zeros(2, dtype=torch.int64)]

    @staticmethod
    def fused_attn_bwd(*given: Any) -> list[Tensor | None]:
        query, key, value = [it for it in given if isinstance(it, Tensor) and it.dim() == 4][:3]
        return [torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), None]

    @staticmethod
    def multi_tensor_l2norm(_chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], _each: bool) -> Any:
        first = lists[0][0]
        return first.new_zeros(1, dtype=torch.float32), first.new_zeros(0, dtype=torch.float32)
