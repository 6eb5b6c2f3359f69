"""Restricts unpickling of checkpoints to tensors, plain values, and the few classes that an engine stores.

Loading an untrusted pickle can run any code.
"""

import argparse
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

import torch
from torch.torch_version import TorchVersion

from tridock.contracts.safe_pickles import ARRAYS, ENUMS, FOREIGN, LOSS_SCALERS
from tridock.errors import Problem, RequestError
from tridock.train.checkpoints.write_errors import replaced


@contextmanager
def safe_torch_load(more: Sequence[Any] = (), mmap: bool = False) -> Iterator[None]:
    """Makes torch.load accept only tensors, plain values, four classes of DeepSpeed, and ``more``. A context manager.

    DeepSpeed itself calls it with ``weights_only=False``. With ``mmap`` it reads tensors when they are used.
    """
    # Without it, DeepSpeed prints on standard output which one it has found.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.fp16.loss_scaler import LossScaler as StaticLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    load = torch.load

    def strict(*given: Any, **named: Any) -> Any:
        return load(*given, **{**named, "weights_only": True, **({"mmap": True} if mmap else {})})

    known = [DynamicLossScaler, StaticLossScaler, ZeroStageEnum, fragment_address, (_member, "builtins.getattr")]
    with torch.serialization.safe_globals([_named(it) for it in (*known, *more)]), replaced(torch, "load", strict):
        yield


def _named(allowed: Any) -> Any:
    """Returns what torch allows by its name; before torch 2.6 that is its own name, not the second of a pair."""
    if not isinstance(allowed, tuple) or TorchVersion(torch.__version__) >= "2.6":
        return allowed
    found, path = allowed
    module, _, name = path.rpartition(".")
    if isinstance(found, type):
        return type(name, (found,), {"__module__": module})

    def alias(*given: Any) -> Any:
        return found(*given)

    alias.__module__, alias.__name__, alias.__qualname__ = module, name, name
    return alias


_FOREIGN: Final = re.compile(r"GLOBAL (\S+)|Unsupported (?:class|operand) (\S+)")


@contextmanager
def refusing_foreign(todo: str) -> Iterator[None]:
    """Makes torch.load name the file in what it raises: :class:`RequestError`. A context manager.

    A file may be damaged, or hold an object of a class that is not safe to load.
    """
    load = torch.load

    def named(file: Any, *given: Any, **options: Any) -> Any:
        try:
            return load(file, *given, **options)
        except pickle.UnpicklingError as error:
            found = _FOREIGN.search(str(error))
            what = FOREIGN
            got = found[1] or found[2] if found else str(error).strip().splitlines()[0]
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            what, got = "cannot be read", str(error).strip().splitlines()[0]
        raise RequestError(Problem(str(file), what, got, todo))

    with replaced(torch, "load", named):
        yield


class _Member:
    """Replaces a member of an enum in the arguments of a later Megatron-LM."""

    def __init__(self, value: object) -> None:
        self.value = value


def _member(owner: object, name: str) -> Enum | _Member:
    """Replaces ``getattr`` and returns only enum members, which Python 3.11.0 to 3.11.3 pickles with it."""
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner[name]
    if isinstance(owner, type) and issubclass(owner, _Member):
        return owner(name)
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is no member of an enum")


def is_zip(file: Path) -> bool:
    """Whether torch can memory-map a file, unlike one of torch before 1.6 (Megatron-LM v1.1.5 ran on both)."""
    return zipfile.is_zipfile(file)


class _LossScaler:
    """Replaces the loss scaler of Megatron-LM v1.1.5's own fp16 optimizer, which no engine here uses."""


def megatron_classes() -> list[Any]:
    """Returns the classes in a checkpoint of Megatron-LM: its arguments, with later versions' enums, Python's and
    NumPy's random states, and v1.1.5's loss scaler."""
    import numpy as np

    rebuild = np.zeros(0).__reduce__()[0]
    kinds = [type(np.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    own = [*((_LossScaler, name) for name in LOSS_SCALERS), *((_Member, name) for name in ENUMS)]
    replaced_ = [*((rebuild, name) for name in ARRAYS), *own]
    return [argparse.Namespace, np.ndarray, np.dtype, *kinds, *replaced_]


_DISTRIBUTED: Final = "torch.distributed.checkpoint."
_METADATA: Final = {
    f"{_DISTRIBUTED}metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    f"{_DISTRIBUTED}planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    f"{_DISTRIBUTED}filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath"),
}


class ForeignObjectError(pickle.UnpicklingError):
    """A checkpoint's ``.metadata`` contains an object that Tridock never writes."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 has it
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise ForeignObjectError(f"{module}.{name} does not belong into a checkpoint's .metadata")


@contextmanager
def safe_metadata_load() -> Iterator[None]:
    """Makes torch refuse foreign classes in the ``.metadata`` of a distributed checkpoint. A context manager.

    Raises :class:`ForeignObjectError`; torch wraps it and keeps only its text.
    """
    from torch.distributed.checkpoint import CheckpointException, filesystem

    refused: list[ForeignObjectError] = []

    def load(stream: IO[bytes]) -> Any:
        try:
            return _MetadataUnpickler(stream).load()
        except ForeignObjectError as error:
            refused.append(error)
            raise

    try:
        with replaced(filesystem, "pickle", SimpleNamespace(load=load)):
            yield
    except CheckpointException as error:
        if refused:
            raise refused[0] from error
        raise
