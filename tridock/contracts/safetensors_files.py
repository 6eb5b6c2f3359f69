"""The weights in a transformers folder, by its files' headers: names, shapes, formats, and whether all is there."""

import itertools
import json
import math
import shlex
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.pretrained import (
    CONFIG,
    DOWNLOAD,
    INDEX,
    SAVED,
    SINGLE,
    StoredWeights,
    is_token_table,
    listed,
    read_config,
)
from tridock.errors import Problem, RequestError

_ELEMENT_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2}
"""The types of weights that are read (:data:`tridock.contracts.pretrained.DTYPES`)."""
_LENGTH: Final = struct.Struct("<Q")
_LONGEST_HEADER: Final = 100_000_000
"""The library's own limit."""
_CONVERT: Final = (
    "import sys, transformers as it; model = it.AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype='auto');"
    " model.save_pretrained(sys.argv[1])"
)
"""A program that adds safetensors to a folder; it runs no code from a pickle, as ``weights_only`` of torch.load."""
_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight is: in which file, in which format and shape, and from which byte on how many."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def transformers_folder(folder: Path) -> tuple[StoredWeights, Mapping[str, Place]]:
    """Returns what is in a transformers folder, and where.

    Raises :class:`RequestError` if a file is missing, damaged, not complete or not named by the index, or if the index
    and the files disagree about a weight.
    """
    if not (folder / CONFIG).is_file():
        raise RequestError(Problem(str(folder), f"holds no {CONFIG}", "", SAVED))
    config, places = read_config(folder), _places(folder)
    stored = StoredWeights(
        None,
        str(folder),
        {name: it.shape for name, it in places.items()},
        dict(_copies(places)),
        config,
        str(folder),
        has_config=True,
        other_dtypes={name: it.dtype for name, it in places.items() if it.dtype not in _ELEMENT_BYTES},
    )
    return stored, places


def _places(folder: Path) -> dict[str, Place]:
    weight_map = _weight_map(folder)
    files = [SINGLE] if weight_map is None else sorted({*weight_map.values()})
    missing = [name for name in files if not (folder / name).is_file()]
    if missing == [SINGLE] and (pickles := sorted(it.name for it in folder.glob("pytorch_model*.bin"))):
        for name in pickles:
            refuse_pointer(folder / name)
        todo = f"convert them to safetensors: {shlex.join(['python', '-c', _CONVERT, str(folder)])}"
        raise RequestError(Problem(str(folder), "holds weights in pickles, which are not read", listed(pickles), todo))
    if missing:
        raise RequestError(Problem(str(folder), "lacks files of weights", listed(missing), DOWNLOAD))
    found = [*folder.glob("*.safetensors"), *folder.glob("adapter_config.json")]
    if other := sorted({file.name for file in found} - {*files}):
        what = f"holds weights beside those of {SINGLE if weight_map is None else INDEX}"
        raise RequestError(Problem(str(folder), what, listed(other), "move them away, or merge adapters"))
    headers = {name: _read_header(folder / name) for name in files}
    weight_map = weight_map if weight_map is not None else dict.fromkeys(headers[SINGLE], SINGLE)
    lacking = [name for name, file in weight_map.items() if name not in headers[file]]
    if lacking:
        what = f"lacks weights that {INDEX} names"
        raise RequestError(Problem(str(folder), what, listed(lacking), DOWNLOAD))
    if odd := [f"{name} in {file}" for file in files for name in headers[file] if weight_map.get(name) != file]:
        raise RequestError(Problem(str(folder), f"holds weights that {INDEX} does not name", listed(odd), DOWNLOAD))
    return {name: headers[file][name] for name, file in weight_map.items()}


def _copies(places: Mapping[str, Place]) -> list[tuple[str, str]]:
    """Returns the output layer with the token table that it is a copy of, byte for byte."""
    tables = [name for name in places if is_token_table(name)]
    heads = [name for name in places if name.endswith("lm_head.weight")]
    return [pair for pair in itertools.product(heads, tables) if _are_equal(*(places[name] for name in pair))]


def _are_equal(one: Place, other: Place) -> bool:
    if (one.dtype, one.shape, one.size) != (other.dtype, other.shape, other.size):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        pieces = (min(_AT_ONCE, one.size - done) for done in range(0, one.size, _AT_ONCE))
        return all(first.read(size) == second.read(size) for size in pieces)


def _weight_map(folder: Path) -> Mapping[str, str] | None:
    """Returns the file of each weight by the index; None without one."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        refuse_pointer(path, content)
        found = json.loads(content)["weight_map"]
        if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
            raise ValueError("no file for each weight")
    except (KeyError, TypeError, ValueError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(Problem(str(path), "is no index of safetensors", got, "download it again")) from None
    weight_map: Mapping[str, str] = found
    return weight_map


def _read_header(file: Path) -> dict[str, Place]:
    """Returns the weights in a file. Raises :class:`RequestError` if its length is not what its header says."""
    size = file.stat().st_size
    refuse_pointer(file)
    with file.open("rb") as stream:
        begin = stream.read(_LENGTH.size)
        length = _LENGTH.unpack(begin)[0] if len(begin) == _LENGTH.size else 0
        if size < _LENGTH.size + (length if length <= _LONGEST_HEADER else 0):
            raise _cut(file, size, _LENGTH.size + length)
        text = stream.read(length) if length <= _LONGEST_HEADER else b""
    try:
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length:,} bytes")
        places = _parsed(json.loads(text), file, _LENGTH.size + length)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(Problem(str(file), "is no file of safetensors", got, "download it again")) from None
    wanted = max((it.begin + it.size for it in places.values()), default=_LENGTH.size + length)
    if size != wanted:
        raise _cut(file, size, wanted)
    return places


def _parsed(header: Mapping[str, Any], file: Path, start: int) -> dict[str, Place]:
    """Returns the weights that a header describes, whose bytes follow one another from ``start`` on."""
    found = {}
    for name, it in header.items():
        if name != "__metadata__":
            shape, (begin, end) = tuple(int(size) for size in it["shape"]), it["data_offsets"]
            found[name] = Place(file, it["dtype"], shape, start + begin, end - begin)
            wanted = math.prod(shape) * _ELEMENT_BYTES.get(it["dtype"], 0)
            if wanted and end - begin != wanted:
                raise ValueError(f"{end - begin:,} bytes for {name}, not {wanted:,}")
    for place in sorted(found.values(), key=lambda it: (it.begin, it.size)):
        if place.begin != start:
            raise ValueError(f"a weight at byte {place.begin:,}, not {start:,}")
        start += place.size
    return found


def _cut(file: Path, size: int, wanted: int) -> RequestError:
    what = "is cut short" if size < wanted else "is longer than its header says"
    got = f"{size:,} bytes" + (f", not {wanted:,}" if size else "")
    return RequestError(Problem(str(file), what, got, "download it again"))
