"""The header of Megatron's ``<prefix>.idx``, and how documents are divided, read without NumPy on a node too.

:mod:`tridock.data.dataset.indexed_dataset` has the layout of the whole file.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tridock.contracts.git_lfs import pointer_problem, refuse_pointer
from tridock.errors import Problem, RequestError

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
ITEM_BYTES: Final[Mapping[int, int]] = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Bytes of a token, by the code of its type."""
COPY_OR_REBUILD: Final = "copy both files again, or build them again with `tridock data preprocess`"
SPLITS: Final = ("train", "valid", "test")


def share_bounds(documents: int, shares: Sequence[float]) -> tuple[int, int, int, int]:
    """Returns the first documents of train, valid and test, and the end, rounded as megatron-core does.

    ``shares`` are three numbers with any sum above 0.
    """
    total = sum(shares)
    ends = [round(documents * sum(shares[: count + 1]) / total) for count in range(3)]
    return 0, ends[0], ends[1], ends[2]


def split_bounds(documents: int, split: str) -> tuple[int, int, int, int]:
    """Does :func:`share_bounds` for shares such as ``"949,50,1"``."""
    return share_bounds(documents, [float(share) for share in split.split(",")])


def megatron_v115_bounds(sequences: int, split: str) -> tuple[int, int, int, int]:
    """Does :func:`split_bounds` as Megatron-LM v1.1.5: over sequences, with each part rounded by itself.

    Source: ``get_train_valid_test_split_`` of its ``megatron/data/dataset_utils.py``.
    """
    shares = [float(share) for share in split.split(",")]
    sizes = [round(share / sum(shares) * float(sequences)) for share in shares]
    excess = sum(sizes) - sequences
    return 0, sizes[0] - excess, sizes[0] + sizes[1] - excess, sequences


@dataclass(frozen=True, slots=True)
class Part:
    """What a data set has for training, validation or test. Sizes are numbers of documents and tokens."""

    documents: int
    tokens: int


def parts_of(prefix: Path, split: str, *, v115: bool = False) -> tuple[Part, ...]:
    """Returns the parts of a data set for shares such as ``"949,50,1"``: train, valid and test.

    With ``v115``, those of Megatron-LM v1.1.5, which takes each sequence for a document.

    Reads only the positions that it needs. Raises :class:`RequestError` if the index is damaged or of another .bin, and
    OSError if one of the files cannot be read.
    """
    index, data = (prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".idx", ".bin"))
    with index.open("rb") as file:
        code, sequences, entries = read_header(index, file.read(HEADER.size), index.stat().st_size)
        lengths, offsets, documents = (HEADER.size + width * sequences for width in (0, 4, 12))
        item, size, promised = ITEM_BYTES[code], data.stat().st_size, 0
        if sequences:
            last = sequences - 1
            promised = _at(file, offsets + 8 * last, "<q") + item * _at(file, lengths + 4 * last, "<i")
        if promised != size:
            raise RequestError(wrong_size(data, promised, size))
        bounds = megatron_v115_bounds(sequences, split) if v115 else split_bounds(entries - 1, split)
        firsts = bounds if v115 else [_at(file, documents + 8 * bound, "<q") for bound in bounds]
        tokens = [size // item if it >= sequences else _at(file, offsets + 8 * it, "<q") // item for it in firsts]
    return tuple(Part(bounds[part + 1] - bounds[part], tokens[part + 1] - tokens[part]) for part in range(3))


def _at(file: BinaryIO, place: int, form: str) -> int:
    file.seek(place)
    value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value


def read_header(index: Path, start: bytes, size: int) -> tuple[int, int, int]:
    """Returns the code of the token type, the sequences and the entries of the document index.

    ``start`` is the beginning of an index of ``size`` bytes. Raises :class:`RequestError` if it is another format or
    truncated.
    """
    if start[: len(MAGIC)] != MAGIC:
        refuse_pointer(index)
        got = repr(start[: len(MAGIC)])
        raise RequestError(Problem(str(index), "is not an index of Megatron", got, COPY_OR_REBUILD))
    if len(start) < HEADER.size:
        raise RequestError(Problem(str(index), "ends inside its header", f"{len(start)} bytes", COPY_OR_REBUILD))
    _, version, code, sequences, entries = HEADER.unpack(start)
    if version != VERSION:
        what = f"has a version other than {VERSION}"
        raise RequestError(Problem(str(index), what, str(version), "build it again with `tridock data preprocess`"))
    if code not in ITEM_BYTES:
        todo = "build it again with `tridock data preprocess`"
        raise RequestError(Problem(str(index), "has an unknown token type", f"code {code}", todo))
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size != expected or entries == 0:
        what = f"promises {sequences} sequences and {entries} document entries, which take {expected} bytes"
        raise RequestError(Problem(str(index), what, f"{size} bytes", COPY_OR_REBUILD))
    return code, sequences, entries


def wrong_size(data: Path, promised: int, size: int) -> Problem:
    """Returns the problem of a .bin that does not fit its index."""
    with data.open("rb") as file:
        pointer = pointer_problem(data, file.read(1024))
    what = f"does not fit its index, which describes {promised} bytes"
    return pointer or Problem(str(data), what, f"{size} bytes", COPY_OR_REBUILD)
