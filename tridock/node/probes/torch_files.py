"""Names and shapes in files of torch.save, read without torch and without any class that the files name.

A node's preflight reads them before a run starts. Objects of other classes become inert ones.
"""

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from tridock.contracts.git_lfs import refuse_pointer
from tridock.errors import Problem, RequestError, reason_of


class Shape(tuple[int, ...]):
    """The shape of a tensor. Tensors with the same ``place``, a storage and an offset, share their elements."""

    place: tuple[str, int] | None = None
    dtype: str = "float32"
    """torch's name of its type; that of a size alone is unknown."""


class _Storage(NamedTuple):
    key: str
    dtype: str


class Inert:
    """An object of any class: it accepts what a pickle does with it. Its state is kept."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


def read_shapes(file: Path) -> Any:
    """Returns the object in a file of torch.save, with a :class:`Shape` for each tensor.

    Raises :class:`RequestError` if it is damaged or cut short.
    """
    return read_named(file)[0]


def read_named(file: Path) -> tuple[Any, Sequence[str]]:
    """Returns the object of :func:`read_shapes`, and the classes and functions that the file names."""
    try:
        refuse_pointer(file)
        if not zipfile.is_zipfile(file):
            return _read_legacy(file)
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                unpickler = _Unpickler(stream)
                return unpickler.load(), unpickler.named
    except RequestError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of it
        got = reason_of(error) or type(error).__name__
    raise RequestError(Problem(str(file), "is no complete file of torch.save", got, "copy it again"))


def is_whole(file: Path) -> bool:
    """Whether a file's end is there. Only the format of torch before 1.6 cannot be checked."""
    with file.open("rb") as stream:
        is_zip = stream.read(4) == b"PK\x03\x04"
    return zipfile.is_zipfile(file) if is_zip else file.stat().st_size > 0


def _read_legacy(file: Path) -> tuple[Any, Sequence[str]]:
    """Reads the format of torch before 1.6: a number, a version and the system's sizes precede the object."""
    with file.open("rb") as stream:
        if _Unpickler(stream).load() != _MAGIC:
            raise pickle.UnpicklingError("neither a ZIP archive nor a file of torch before 1.6")
        for _ in range(2):
            _Unpickler(stream).load()
        unpickler = _Unpickler(stream)
        return unpickler.load(), unpickler.named


_MAGIC: Final = 0x1950A86A20F9469CFC6C


def _rebuild_tensor(storage: _Storage, offset: int, size: Any, *_: Any) -> Shape:
    found = Shape(size)
    found.place, found.dtype = (storage.key, offset), storage.dtype
    return found


def _rebuild_typed(storage: _Storage, offset: int, size: Any, *more: Any) -> Shape:
    """Of types that have no storage of their own, such as fp8."""
    return _rebuild_tensor(_Storage(storage.key, str(more[3])), offset, size)


_STORAGES: Final = {
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "DoubleStorage": "float64",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
}
_DTYPE: Final = re.compile(r"^(u?int|b?float|complex|bool)[0-9a-z_]*$")

_KNOWN: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch", "Size"): Shape,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, encoding="utf-8")
        self.named: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        self.named.append(f"{module}.{name}")
        if module == "torch" and (name in _STORAGES or _DTYPE.match(name)):
            return _STORAGES.get(name, name)
        return _KNOWN.get((module, name), Inert)

    def persistent_load(self, given: Any) -> _Storage:
        """torch's tuple begins with a word, the type and the key."""
        return _Storage(str(given[2]), given[1] if isinstance(given[1], str) else "unknown")
