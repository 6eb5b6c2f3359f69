"""A GPU for torch's CPU build: fake tensors compute nothing, but know their device, and autograd runs on them.

torch's fake tensors alone do not suffice: a backward pass needs a device guard for CUDA, which pretended_gpu.cpp has.
Streams, events and random states of ``torch.cuda`` are stand-ins.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tridock.train.models import layered
from tridock.train.parallel import strategies
from tridock.train.rank.process_group import Ranks

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
_SOURCE = Path(__file__).with_suffix(".cpp")
_BUILT = Path(__file__).parents[3] / ".cache" / "tests"

_OF_NUMBERS = (
    (layered, "compute_local_shape_and_global_offset"),
    (DeviceMesh, "__init__"), (DeviceMesh, "__getitem__"),
)  # fmt: skip
"""What computes with the numbers of ranks, which have to be real."""


def _library() -> ctypes.CDLL:
    """The compiled source, kept for each version of torch and of the source."""
    folder = Path(torch.__file__).parent
    made = _BUILT / f"pretended-gpu-{torch.__version__}-{_SOURCE.stat().st_mtime_ns}.so"
    if not made.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILT) as partial:
            built = Path(partial, "made.so")
            argv = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{folder}/include", str(_SOURCE), "-o", str(built)]
            argv += [f"-L{folder}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(argv, check=True)
            built.replace(made)
    return ctypes.CDLL(str(made))


class Transfers(TorchDispatchMode):
    """Counts what makes the host wait for a GPU, or the GPU for the host: values that are read, and copies.

    A value that is read of the GPU is 0, one of the host is ``on_host``.
    """

    def __init__(self, on_host: int = 0) -> None:
        super().__init__()
        self.on_host = on_host
        self.counts: Counter[str] = Counter()

    def all(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            is_on_gpu = args[0].device.type == "cuda"
            self.counts["read"] += is_on_gpu
            return 0 if is_on_gpu else self.on_host
        out = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and isinstance(out, Tensor):
            source = args[1] if name == "copy_" else args[0]
            places = source.device.type, out.device.type
            if places[0] != places[1]:
                waits = not kwargs.get("non_blocking") and not (len(args) > 2 and args[2])
                self.counts[f"{places[0]} to {places[1]}" + ("" if waits else ", asynchronous")] += 1
        return out


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made while it is on and still there, by device."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                storage, device = tensor.untyped_storage(), tensor.device.type
                self._seen.add(key)
                self.live[device] += storage.nbytes()
                weakref.finalize(storage, self._free, key, device, storage.nbytes())
        return out

    def _free(self, key: int, device: str, size: int) -> None:
        self._seen.discard(key)
        self.live[device] -= size


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0 if name == "elapsed_time" else True


class _Stream(_Event):
    device = GPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: object) -> _Event:
        return _Event()


def _without_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return real


class _Without:
    """An object whose method does nothing."""

    def __init__(self, whole: Any, method: str) -> None:
        self._whole, self._method = whole, method

    def __getattr__(self, name: str) -> Any:
        return (lambda: False) if name == self._method else getattr(self._whole, name)


def _metadata(shape: Sequence[int], dtype: torch.dtype) -> Callable[..., Any]:
    """What a stage would hear from its neighbours about the activations, and the gradients, that it gets from them."""

    def received(stage: Any, other: int) -> Any:
        if other > stage.stage_index:
            return pipelining._StageBackwardMeta(backward_metas=stage._stage_meta.outputs)
        activations = torch.zeros(shape, dtype=dtype, device=GPU, requires_grad=True)
        return pipelining._StageForwardMeta(forward_metas=pipelining.extract_tensor_metas((activations,)))

    return received


def _with_hook(make: Callable[..., Any]) -> Callable[..., Any]:
    """The reducer's own exchange wants a result, which collectives that do nothing lack."""

    def exchanged(_, bucket):  # type: ignore[no-untyped-def]  # torch wants types, not their names
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def made(*given: Any) -> Any:
        model = make(*given)
        model.register_comm_hook(None, exchanged)
        # It sends sizes from real memory, and times with CUDA's events.
        model.reducer = _Without(model.reducer, "_rebuild_buckets")
        model.logger = _Without(model.logger, "set_runtime_stats_and_log")
        return model

    return made


def _gather_own(of_all: list[Any], own: Any, group: object = None) -> None:
    of_all[:] = [own] * len(of_all)


def _type(tensor: Tensor, *dtype: Any) -> Any:
    """As torch's, whose name for a fake tensor is that of one on the CPU."""
    if dtype:
        return tensor.to(*dtype)
    kinds = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
    return f"torch.{'cuda.' if tensor.device.type == 'cuda' else ''}{kinds[tensor.dtype]}Tensor"


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As torch's, which cannot put one fake tensor in the place of another."""
    for child in module.children() if recurse else ():
        _apply(child, change)
    for name, old in list(module._parameters.items()):
        if old is not None:
            with torch.no_grad():
                changed = change(old)
            if (changed.device, changed.dtype) == (old.device, old.dtype):
                continue
            new = nn.Parameter(changed, old.requires_grad)
            new.__dict__ |= {key: value for key, value in old.__dict__.items() if key not in new.__dict__}
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


def _forget_meshes() -> None:
    """torch keeps what it found of DTensors by their meshes, which are equal for all ranks; their groups are not."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    if clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None):
        clear()


@contextmanager
def pretended_gpu(
    world_size: int = 1, rank: int = 0, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Ranks, FakeTensorMode]]:
    """Inside, ``cuda:0`` is a device, and this process one of the ranks of a group whose collectives do nothing."""
    library = _library()
    generator = torch.Generator()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # before CUDA is available: torch would look at its devices
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "device": lambda _: nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "manual_seed": lambda _: None,
        "default_generators": (generator,),
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda *_, **__: None,
        "get_device_capability": lambda *_: CAPABILITY,
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=80 << 30, name="GPU", major=9, minor=0),
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True, create=True))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", _gather_own))
        stack.enter_context(mock.patch.object(Tensor, "type", _type))
        for owner, name in _OF_NUMBERS:
            stack.enter_context(mock.patch.object(owner, name, _without_fakes(getattr(owner, name))))
        # DDP's check that all ranks have the same parameters.
        stack.enter_context(mock.patch.object(distributed, "_verify_param_shape_across_processes"))
        stack.enter_context(mock.patch.object(distributed, "_sync_module_states"))
        stack.enter_context(mock.patch.object(PipelineStage, "_recv_meta", _metadata(shape, dtype), create=True))
        stack.enter_context(mock.patch.object(PipelineStage, "_send_meta", create=True))
        stack.enter_context(mock.patch.object(strategies, "_ddp", _with_hook(strategies._ddp)))
        for name in ("get_rng_state", "set_rng_state"):
            stack.enter_context(mock.patch.object(torch.cuda.random, name, stand_ins[name]))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name))
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        library.pretend(True)
        stack.callback(library.pretend, False)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.callback(_forget_meshes)
        yield Ranks(rank, 0, world_size, GPU), mode


def _start_autograd() -> None:
    """Autograd starts a thread for each device that there is at the first backward pass of a process.

    Here, while tests are collected: others run backward passes on the CPU before.
    """
    library = _library()
    library.pretend(True)
    with FakeTensorMode():
        torch.zeros(1, device=GPU, requires_grad=True).sum().backward()
    library.pretend(False)


REASON = ""
"""Why there is no pretended GPU here."""
if torch.version.cuda is not None:
    REASON = "torch's CUDA build asks the driver"
elif shutil.which("g++") is None:
    REASON = "needs g++"
else:
    _start_autograd()
