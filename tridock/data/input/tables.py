"""Tables: rows of Parquet and Arrow files, in batches, and their values in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class Parquet:
    """A Parquet file, read page by page. ``batches`` yields rows, and the share of the file before their end."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        self.schema = self._file.schema_arrow

    def batches(self, size: int, keys: list[str], _columns: list[str]) -> Iterator[tuple[Any, float]]:
        metadata, done = self._file.metadata, 0
        rows, pending = (
            max(metadata.num_rows, 1),
            sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)),
        )
        batch_size = max(1, min(256, size * rows // max(pending, 1)))
        for batch in self._file.iter_batches(batch_size=batch_size, columns=keys):
            done += batch.num_rows
            yield batch, done / rows


class Arrow:
    """An Arrow IPC file or stream, such as Feather or one of ``datasets``. ``batches`` is as of Parquet."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._file = pyarrow.OSFile(str(path))
        file = pyarrow.ipc.open_file if self._file.read(6) == b"ARROW1" else pyarrow.ipc.open_stream
        self._file.seek(0)
        self._reader = file(self._file)
        self.schema = self._reader.schema

    def batches(self, size: int, _keys: list[str], columns: list[str]) -> Iterator[tuple[Any, float]]:
        whole = self._file.size()
        numbers = range(getattr(self._reader, "num_record_batches", 0))
        found = map(self._reader.get_batch, numbers) if numbers else iter(self._reader)
        for number, batch in enumerate(found, start=1):
            batch.validate(full=True)  # a damaged offset would lead anywhere in memory
            own = batch.select(columns)
            step = max(1, min(256, size * batch.num_rows // max(own.nbytes, 1)))
            for start in range(0, batch.num_rows, step):
                yield own.slice(start, step), number / len(numbers) if numbers else self._file.tell() / whole


def column_of(fields: Iterable[Any], key: str) -> str | None:
    """Returns the column that a key names or is in, as ``data`` for ``data.text``; None without one."""
    from pyarrow import types

    kinds = {field.name: field.type for field in fields}
    first, _, inner = key.partition(".")
    if key in kinds:
        return key
    nested = inner and first in kinds and types.is_struct(kinds[first])
    return first if nested and column_of(kinds[first], inner) else None


def value_in_json(value: object) -> object:
    """Returns what stands in a JSON line for bytes or for another value that JSON cannot represent."""
    if not isinstance(value, bytes):
        return {"value": repr(value)}
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return {"not UTF-8": f"byte 0x{value[error.start]:02x} at {error.start + 1}"}
