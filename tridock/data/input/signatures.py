"""Files that are no texts, by their first bytes, and how to make texts of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tridock.contracts.git_lfs import pointer_problem
from tridock.errors import Problem

START: Final = 512
"""Bytes that the signatures need."""
_DOWNLOAD: Final = "download the file itself"
_UNPACK: Final = "unpack it, and give its files"
_PIPE: Final = f"{_UNPACK}, or its lines: {{}} {{1}} | tridock data preprocess --input - …"
_ICONV: Final = "convert it: iconv -f {0} -t UTF-8 {1} > NEW"
_TEXT: Final = "extract its texts first"
_WRITE: Final = "write it as Parquet or JSON lines"
_SIGNATURES: Final[Sequence[tuple[tuple[bytes, ...], str, str]]] = (
    ((b"%PDF-",), "a PDF", f"{_TEXT}: pdftotext {{1}} NEW.txt"),
    ((b"{\\rtf", b"\x89PNG", b"\xff\xd8\xff"), "RTF or a picture", _TEXT),
    ((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "UTF-32", _ICONV.replace("{0}", "UTF-32")),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16", _ICONV.replace("{0}", "UTF-16")),
    ((b"PK\x03\x04",), "a zip archive", _PIPE.replace("{}", "unzip -p")),
    ((b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07"), "an archive", _UNPACK),
    ((b"\x04\x22\x4d\x18",), "compressed with lz4", "decompress it: lz4 -d {1} NEW"),
    ((b"\xff\x06\0\0sNaPpY", b"LZIP\x01", b"\x1f\x9d"), "compressed in another way", "compress it with zstd"),
    ((b"Obj\x01", b"\x89HDF", b"SQLite format 3\0", b"FEA1"), "Avro, HDF5, SQLite or Feather 1", _WRITE),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle", _WRITE),
)
"""First bytes, what a file is that begins with one of them, and what to do with it; {1} stands for its name."""
_PAGES: Final = (b"<!doctype html", b"<html")
_WITHOUT_MARK: Final = {(True, False): "UTF-16BE", (False, True): "UTF-16LE"}


def foreign(name: str, start: bytes, file: str | None, pages: bool = False) -> Problem | None:
    """Returns the problem of a file that is no text by the ``START`` bytes at its start; None of any other.

    ``file`` is its path for the remedy, if that holds these bytes as they are: uncompressed. ``pages``: HTML is text.
    """
    path = "FILE" if file is None else shlex.quote(file)
    if (pointer := pointer_problem(file or "FILE", start)) is not None:
        return replace(pointer, where=name)
    for begins, what, todo in _SIGNATURES:
        if start.startswith(begins):
            return Problem(name, f"is {what}", "", todo.replace("{1}", path))
    if start[257:262] == b"ustar":
        return Problem(name, "is a tar archive", "", _PIPE.replace("{}", "tar -xOf").replace("{1}", path))
    if not pages and start.lstrip().lower().startswith(_PAGES):
        return Problem(name, "is an HTML page", "", f"{_DOWNLOAD} (of the hub: /resolve/, not /blob/), or {_TEXT}")
    # The first characters of JSON are ASCII: in UTF-16 every other byte is zero.
    zeros = {(not high, not low) for high, low in zip(start[:64:2], start[1:64:2], strict=False)}
    if len(start) >= 4 and len(zeros) == 1 and (encoding := _WITHOUT_MARK.get(zeros.pop())) is not None:
        return Problem(name, f"is {encoding}", "", _ICONV.replace("{0}", encoding).replace("{1}", path))
    return None
