"""Megatron's indexed data sets: ``<prefix>.bin`` has token ids, ``<prefix>.idx`` the position of each sequence.

Layout of the index, little-endian, as in Megatron-LM's ``indexed_dataset.py`` (``MMapIndexedDataset``)::

    9 bytes   MMIDIDX\\0\\0
    uint64    version, 1
    uint8     code of the token type: 4 int32, 8 uint16 (1 uint8, 2 int8, 3 int16, 5 int64 are read too)
    uint64    sequences S
    uint64    entries of the document index D (documents + 1)
    int32[S]  tokens of each sequence
    int64[S]  offset of each sequence in the .bin, in bytes
    int64[D]  first sequence of each document, from 0; the last entry is S

An empty document has no sequence: it repeats an entry of the document index.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tridock.contracts.data_index import COPY_OR_REBUILD, HEADER, MAGIC, VERSION, read_header, wrong_size
from tridock.errors import Problem, RequestError

Tokens = NDArray[Any]

DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
UINT16_VOCABULARY: Final = 65500
"""Megatron writes uint16 for vocabularies under this size, not under 65536."""


def bin_path(prefix: Path) -> Path:
    """Returns ``<prefix>.bin``; a prefix may contain dots."""
    return prefix.parent / f"{prefix.name}.bin"


def idx_path(prefix: Path) -> Path:
    """Returns ``<prefix>.idx``; a prefix may contain dots."""
    return prefix.parent / f"{prefix.name}.idx"


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Returns uint16 for a vocabulary that fits by Megatron's rule, else int32."""
    return DTYPES[8] if vocab_size is not None and vocab_size < UINT16_VOCABULARY else DTYPES[4]


_BLOCK: Final = 1 << 18
"""Entries per block: mapped arrays of any length need little memory."""


def write_index(path: Path, dtype: np.dtype[Any], lengths: Tokens, document_index: Tokens) -> None:
    """Writes an index. ``lengths``: tokens, int32[S]; ``document_index``: int64[D] from 0 to S."""
    sizes = len(lengths), len(document_index)
    write_index_of_blocks(path, dtype, sizes, lambda: in_blocks(lengths), in_blocks(document_index))


def in_blocks(array: Tokens, first: int = 0, last: int | None = None) -> Iterator[Tokens]:
    """Yields entries first to last (exclusive) of a mapped array in blocks."""
    end = len(array) if last is None else last
    for start in range(first, end, _BLOCK):
        yield array[start : min(start + _BLOCK, end)]


def write_index_of_blocks(
    path: Path,
    dtype: np.dtype[Any],
    sizes: tuple[int, int],
    lengths: Callable[[], Iterator[Tokens]],
    document_index: Iterable[Tokens],
) -> None:
    """Does :func:`write_index` for arrays in blocks. ``sizes`` are S and D; ``lengths`` is read twice."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, *sizes))
        for block in lengths():
            file.write(block.astype("<i4").tobytes())
        offset = 0
        for block in lengths():
            widths = block.astype(np.int64) * dtype.itemsize
            ends = np.cumsum(widths) + offset
            file.write((ends - widths).astype("<i8").tobytes())
            offset = int(ends[-1])
        for block in document_index:
            file.write(block.astype("<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def publish(prefix: Path, partial_bin: Path, partial_idx: Path) -> None:
    """Renames two complete files to their final names."""
    # Readers open the index first. Removing it first ensures that no old index meets new tokens.
    idx_path(prefix).unlink(missing_ok=True)
    partial_bin.replace(bin_path(prefix))
    partial_idx.replace(idx_path(prefix))


class Index:
    """A mapped ``.idx``: ``dtype``; ``lengths`` int32[S], ``offsets`` int64[S] in bytes, ``document_index`` int64[D].

    Raises :class:`RequestError` if it is another format or truncated; the arrays are not checked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        buffer = _mapped(path, np.dtype(np.uint8))
        code, sequences, entries = read_header(path, buffer[: HEADER.size].tobytes(), len(buffer))
        self.dtype = DTYPES[code]
        position = HEADER.size
        parts: list[Tokens] = []
        for dtype, count in ((np.dtype("<i4"), sequences), (np.dtype("<i8"), sequences), (np.dtype("<i8"), entries)):
            parts.append(np.frombuffer(buffer, dtype=dtype, count=count, offset=position))
            position += dtype.itemsize * count
        self.lengths, self.offsets, self.document_index = parts

    @property
    def promised(self) -> int:
        """Size in bytes of the .bin that it describes."""
        return int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize


class IndexedDataset(Index):
    """A memory-mapped data set. ``dataset[i]`` is sequence i: an array of token ids, shape [length], not copied.

    Attributes: those of its index; ``tokens``, the whole .bin as one array. All are views of the mapped files.

    Raises :class:`RequestError` if the files are missing, another format, truncated, or do not belong together.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        check_presence(prefix)
        super().__init__(idx_path(prefix))
        data = bin_path(prefix)
        self.tokens = _mapped(data, self.dtype)
        self._check_consistency(data, data.stat().st_size)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> Tokens:
        start = int(self.offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    @property
    def documents(self) -> int:
        """Documents, including empty ones."""
        return len(self.document_index) - 1

    def token_bounds(self, first: int, last: int) -> tuple[int, int]:
        """Returns the range of ``tokens`` of the documents first to last (exclusive)."""
        return self._token_at(int(self.document_index[first])), self._token_at(int(self.document_index[last]))

    def _token_at(self, sequence: int) -> int:
        if sequence == len(self):
            return len(self.tokens)
        return int(self.offsets[sequence]) // self.dtype.itemsize

    def _check_consistency(self, data: Path, size: int) -> None:
        if size != self.promised:
            raise RequestError(wrong_size(data, self.promised, size))
        # Checks only the ends, to open a billion documents quickly. With the sum above, this finds mixed-up files.
        contiguous = len(self) == 0 or (
            self.offsets[0] == 0 and int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize == size
        )
        ordered = self.document_index[0] == 0
        if not contiguous or not ordered or self.document_index[-1] != len(self):
            what = "has offsets or documents that are out of order"
            raise RequestError(Problem(str(self.path), what, "a damaged index", COPY_OR_REBUILD))


def _mapped(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """Maps a file as an array of ``dtype``. An empty file cannot be mapped."""
    with RequestError.in_place_of(OSError, path, "cannot be read", "make it readable for this user"):
        count = path.stat().st_size // dtype.itemsize
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype)


def check_presence(prefix: Path) -> None:
    """Raises :class:`RequestError` unless both files exist."""
    index, data = idx_path(prefix), bin_path(prefix)
    missing = [path for path in (index, data) if not path.is_file()]
    if len(missing) == 2:
        todo = "build it with `tridock data preprocess`, or correct data.data_path"
        if prefix.suffix in (".bin", ".idx") and prefix.is_file():
            todo = f"give the prefix: {prefix.with_suffix('')}"
        what = "there is no indexed data set"
        raise RequestError(Problem(str(prefix), what, f"neither {index.name} nor {data.name}", todo))
    if missing:
        present = data if missing[0] == index else index
        raise RequestError(Problem(str(missing[0]), "is missing", f"only {present.name}", COPY_OR_REBUILD))
