"""The weights in a folder of safetensors files, by their headers: names, shapes, and whether every file is complete."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tridock.contracts.pretrained import DOWNLOAD, INDEX, SINGLE, listed
from tridock.errors import Problem, RequestError

Shapes = dict[str, tuple[int, ...]]
_LENGTH: Final = struct.Struct("<Q")
_LONGEST_HEADER: Final = 100_000_000
"""The library's own limit."""
_LFS: Final = b"version https://git-lfs"


def read_folder(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the file and the shape of each weight in a folder.

    Raises :class:`RequestError` if a file is missing, damaged or not complete, or lacks weights that the index names.
    """
    weight_map = _weight_map(folder)
    files = [SINGLE] if weight_map is None else sorted({*weight_map.values()})
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise RequestError(Problem(str(folder), "lacks files of weights", listed(missing), DOWNLOAD))
    headers = {name: read_header(folder / name) for name in files}
    weight_map = weight_map if weight_map is not None else dict.fromkeys(headers[SINGLE], SINGLE)
    lacking = [name for name, file in weight_map.items() if name not in headers[file]]
    if lacking:
        what = f"lacks weights that {INDEX} names"
        raise RequestError(Problem(str(folder), what, listed(lacking), DOWNLOAD))
    return {name: (file, headers[file][name]) for name, file in weight_map.items()}


def _weight_map(folder: Path) -> Mapping[str, str] | None:
    """Returns the file of each weight by the index; None without one."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
            raise ValueError("no file for each weight")
    except (KeyError, TypeError, ValueError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(Problem(str(path), "is no index of safetensors", got, "download it again")) from None
    weight_map: Mapping[str, str] = found
    return weight_map


def read_header(file: Path) -> Shapes:
    """Returns the shapes in a file. Raises :class:`RequestError` if its length is not what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(_LENGTH.size)
        if begin.startswith(_LFS[: _LENGTH.size]) and (begin + stream.read(64)).startswith(_LFS):
            todo = "fetch it: git lfs pull"
            raise RequestError(Problem(str(file), "is a pointer of Git LFS, not the weights", f"{size} bytes", todo))
        length = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else 0
        if size < _LENGTH.size + (length if length <= _LONGEST_HEADER else 0):
            raise _cut(file, size, _LENGTH.size + length)
        text = stream.read(length) if length <= _LONGEST_HEADER else b""
    try:
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length:,} bytes")
        shapes, end = _parsed(json.loads(text))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(Problem(str(file), "is no file of safetensors", got, "download it again")) from None
    if size != (wanted := _LENGTH.size + length + end):
        raise _cut(file, size, wanted)
    return shapes


def _parsed(header: Mapping[str, Any]) -> tuple[Shapes, int]:
    """Returns the shapes, and where the last weight ends."""
    weights = {name: it for name, it in header.items() if name != "__metadata__"}
    shapes = {name: tuple(int(size) for size in it["shape"]) for name, it in weights.items()}
    return shapes, max((int(it["data_offsets"][1]) for it in weights.values()), default=0)


def _cut(file: Path, size: int, wanted: int) -> RequestError:
    what = "is cut short" if size < wanted else "is longer than its header says"
    got = f"{size:,} bytes" + (f", not {wanted:,}" if size else "")
    return RequestError(Problem(str(file), what, got, "download it again"))
