"""Writes indexed data sets document by document, as the tests need them."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from tridock.data.dataset.indexed_dataset import Tokens, publish, token_dtype, write_index


class IndexedDatasetWriter:
    """Writes documents to ``<prefix>.bin/.idx``. Both files appear complete, or after an exception neither.

    A context manager: leaving it without an exception renames the files. Memory grows by 20 bytes per document.
    """

    def __init__(self, prefix: Path, vocab_size: int | None = None) -> None:
        self.prefix = prefix
        self.dtype = token_dtype(vocab_size)
        self.tokens = 0
        self._limit = np.iinfo(self.dtype).max if vocab_size is None else vocab_size - 1
        self._lengths = array("i")
        self._document_index = array("q", [0])
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._mark = f"{os.getpid()}.{secrets.token_hex(4)}.part"
        self._partial_bin = prefix.with_name(f".{prefix.name}.bin.{self._mark}")
        self._partial_idx = prefix.with_name(f".{prefix.name}.idx.{self._mark}")
        self._bin = self._partial_bin.open("xb")

    @property
    def documents(self) -> int:
        """Documents added so far, including empty ones."""
        return len(self._document_index) - 1

    def add_document(self, tokens: Iterable[int] | Tokens) -> None:
        """Appends one document as one sequence; an empty document has no sequence.

        Raises ValueError for an id outside the vocabulary: as uint16 it would be another token.
        """
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray | list) else list(tokens), dtype=np.int64)
        if ids.size:
            if int(ids.min()) < 0 or int(ids.max()) > self._limit:
                raise ValueError(f"token ids {ids.min()} to {ids.max()} do not lie in 0 to {self._limit}")
            self._bin.write(ids.astype(self.dtype).tobytes())
            self._lengths.append(int(ids.size))
            self.tokens += int(ids.size)
        self._document_index.append(len(self._lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._bin.close()
            self._partial_bin.unlink(missing_ok=True)
            self._partial_idx.unlink(missing_ok=True)

    def _publish(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        write_index(self._partial_idx, self.dtype, lengths, np.frombuffer(self._document_index, dtype=np.int64))
        self._bin.flush()
        os.fsync(self._bin.fileno())
        publish(self.prefix, self._partial_bin, self._partial_idx)
