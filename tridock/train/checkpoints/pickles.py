"""Restricts unpickling of checkpoints to tensors, plain values, and the few classes that an engine stores.

Loading an untrusted pickle can run any code.
"""

import argparse
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

import torch
from torch.torch_version import TorchVersion

from tridock.contracts.pretrained import ARRAYS, ENUMS, FOREIGN, LOSS_SCALERS
from tridock.errors import Problem, RequestError
from tridock.train.checkpoints.write_errors import replaced


class ForeignObjectError(pickle.UnpicklingError):
    """A checkpoint contains an object that Tridock never writes."""


@contextmanager
def only_weights(mmap: bool = False) -> Iterator[None]:
    """Makes torch.load accept only tensors, plain values and torch's safe globals, whoever calls it and asks for more:
    DeepSpeed and torch's own distributed checkpoints do. A context manager.

    With ``mmap`` it reads tensors when they are used. Raises :class:`ForeignObjectError` for torch's format of 2016, a
    tar archive, in which torch before 2.6 unpickles anything (CVE-2025-32434; the torch of NVIDIA's 24.12 does too).
    """
    load = torch.load

    def strict(file: Any, *given: Any, **named: Any) -> Any:
        if isinstance(file, str | os.PathLike) and Path(file).is_file() and tarfile.is_tarfile(file):
            raise ForeignObjectError(f"{os.fspath(file)} is a tar archive, which can hold any object")
        return load(file, *given, **{**named, "weights_only": True, **({"mmap": True} if mmap else {})})

    with replaced(torch, "load", strict):
        yield


@contextmanager
def safe_torch_load(more: Sequence[Any] = (), mmap: bool = False) -> Iterator[None]:
    """:func:`only_weights`, with four classes of DeepSpeed and ``more``."""
    # Without it, DeepSpeed prints on standard output which one it has found.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.fp16.loss_scaler import LossScaler as StaticLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [DynamicLossScaler, StaticLossScaler, ZeroStageEnum, fragment_address, (_member, "builtins.getattr")]
    with torch.serialization.safe_globals([_named(it) for it in (*known, *more)]), only_weights(mmap):
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
        *("TensorStorageMetadata", "ChunkStorageMetadata"),
    ),
    f"{_DISTRIBUTED}planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    f"{_DISTRIBUTED}filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath"),
}


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
def safe_distributed_load() -> Iterator[None]:
    """Makes torch refuse foreign classes in a distributed checkpoint: in its ``.metadata``, and in the values that are
    no tensors, which torch loads with ``weights_only=False``. A context manager.

    Raises :class:`ForeignObjectError`, and :class:`RequestError` for another torch's ``.metadata``; torch wraps errors
    and keeps only their text.
    """
    from torch.distributed.checkpoint import CheckpointException, filesystem

    refused: list[Exception] = []

    def load(stream: IO[bytes]) -> Any:
        try:
            return _MetadataUnpickler(stream).load()
        except ForeignObjectError as error:
            refused.append(error)
            raise
        except (AttributeError, TypeError, ValueError) as error:
            what, todo = f"is not what torch {torch.__version__} reads", "use the torch that wrote it, or a newer one"
            refused.append(RequestError(Problem("the checkpoint's .metadata", what, str(error), todo)))
            raise refused[-1] from None

    try:
        with replaced(filesystem, "pickle", SimpleNamespace(load=load)), only_weights():
            yield
    except CheckpointException as error:
        if refused:
            raise refused[0] from error
        raise
