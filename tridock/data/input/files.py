"""Finds the files of ``--input``. Every file of a folder is read or named in a message."""

import errno
import fnmatch
import glob
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.data.digest import SUMS
from tridock.data.input.compression import DAMAGE, compression, decompressed
from tridock.data.input.remote import RemoteFile, find_urls, is_url, url_name
from tridock.data.input.signatures import START, foreign
from tridock.data.input.sources import TABLES, TODO_INPUT, Kind, Source, printable
from tridock.errors import Problem, RequestError, reason_of

STDIN: Final = "-"
_COMPRESSED: Final = (".gz", ".bgz", ".zst", ".zstd", ".bz2", ".xz")
_SUFFIXES: Final = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), Kind.JSONL),
    **dict.fromkeys((".txt", ".text"), Kind.TEXT),
    ".csv": Kind.CSV,
    ".tsv": Kind.TSV,
}
_BESIDE_TABLES: Final = ("", ".md", ".json", ".yaml", ".yml", ".py")
"""Suffixes of a data set's descriptions, such as README.md, LICENSE and dataset_info.json."""


def find_sources(
    inputs: Sequence[str],
    kind: Kind | None = None,
    default: Kind = Kind.JSONL,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Source, ...]:
    """Returns the inputs in the order given; the files of a folder or pattern sorted by name, without hidden ones.

    A pattern stands for what it matches: files, and folders with all their files.

    ``kind`` applies to every input except Parquet and Arrow files. Without it the file name decides, and ``default``
    applies to names with another suffix. Links are followed. What lies beside the tables of a folder, such as a
    ``README.md``, is not read, and ``say`` says so. Raises :class:`RequestError` with every input that does not exist
    or cannot be read.
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    for given in inputs:
        if given == STDIN:
            sources.append(Source("standard input", None, kind or default))
            continue
        found: list[tuple[Source, Problem | None]] = []
        if is_url(given) and not os.path.lexists(given):
            try:
                found = [_at(url, kind, default) for url in find_urls(given)]
            except RequestError as error:
                problems += error.problems
            problems += [problem for _, problem in found if problem is not None]
            sources += [source for source, _ in found]
            continue
        for path in _files(given, problems):
            try:
                found.append(_source_of(path, kind, default))
            except OSError as error:
                problems.append(_unreadable(path, error))
        tables = [source for source, _ in found if source.kind in TABLES]
        beside = [source for source, _ in found if source not in tables and Path(source.name).suffix in _BESIDE_TABLES]
        if tables and beside and Path(given).is_dir():
            found = [it for it in found if it[0] not in beside]
            more = f" and {len(beside) - 1} more" if len(beside) > 1 else ""
            say(f"{printable(given)}: {len(tables)} tables are read, and not {beside[0].file_name}{more} beside them")
        sources += [source for source, _ in found]
        problems += [problem for _, problem in found if problem is not None]
    if list(inputs).count(STDIN) > 1:
        problems.append(Problem("--input", "names standard input more than once", "", "give - once"))
    RequestError.raise_for(problems)
    return tuple(sources)


def _source_of(path: Path, kind: Kind | None, default: Kind) -> tuple[Source, Problem | None]:
    """Returns a file as an input, and its problem if it is no text."""
    source = Source(printable(path), path, kind or kind_of_name(path.name, default), path.stat().st_size)
    if not path.is_file():
        return source, None  # reading from a pipe would consume it
    with path.open("rb") as file:
        return _checked(source, file)


def _at(url: str, kind: Kind | None, default: Kind) -> tuple[Source, Problem | None]:
    """Returns a file at a URL as an input, and its problem if it is no text."""
    name = url_name(url)
    with RemoteFile(url) as file:
        source = Source(name, None, kind or kind_of_name(name.rpartition("/")[2], default), url=url)
        return _checked(source, io.BufferedReader(file))


def _checked(source: Source, file: io.BufferedReader) -> tuple[Source, Problem | None]:
    start = file.peek(START)[:START]
    how = compression(start)
    if how in TABLES:
        return replace(source, kind=Kind(how)), None
    if how is not None:
        try:
            start = decompressed(source.name, file).read(START)
        except DAMAGE:
            return source, None  # is reported with its line
    path = None if how or source.path is None else str(source.path)
    return source, foreign(source.name, start, path, pages=source.kind is Kind.FILE)


def repeated(sources: Sequence[Source]) -> list[tuple[Source, Source]]:
    """Returns the inputs that are the same file as an earlier one, by name or link; each with that one."""
    first: dict[tuple[int, int], Source] = {}
    found = []
    for source in sources:
        if source.path is not None:
            status = source.path.stat()
            before = first.setdefault((status.st_dev, status.st_ino), source)
            if before is not source:
                found.append((source, before))
    return found


def _files(given: str, problems: list[Problem]) -> list[Path]:
    """Returns the files of one input, and adds what cannot be read to ``problems``."""
    if not given:
        problems.append(Problem("--input", "is empty", "", TODO_INPUT))
        return []
    path, before, found = Path(given), len(problems), list[Path]()
    try:
        if path.is_dir():
            found = list(_walk(path, (), problems))
        elif os.path.lexists(path):
            path.stat()
            found = [path]
        else:
            names = sorted(set(_matching(Path(path.anchor), path.relative_to(path.anchor).parts, (), problems)))
            if len(problems) == before:
                found = list(dict.fromkeys(file for name in names for file in _walk(name, (), problems)))
    except OSError as error:
        problems.append(_unreadable(path, error))
    if not found and len(problems) == before:
        problems.append(Problem(printable(given), "names no file", "", TODO_INPUT))
    problems[before:] = dict.fromkeys(problems[before:])
    return found


def _matching(
    folder: Path, parts: Sequence[str], above: tuple[tuple[int, int], ...], problems: list[Problem]
) -> Iterator[Path]:
    """Yields what the parts of a pattern match in a folder, in any order. Unlike glob it skips nothing unreadable.

    ``above`` identifies the folders that ``**`` has entered.
    """
    part, *rest = parts
    try:
        status = folder.stat()
        found = _entries(folder, part) if stat.S_ISDIR(status.st_mode) else []
    except OSError as error:
        problems.append(_unreadable(folder, error))
        return
    if part == "**":
        identity = status.st_dev, status.st_ino
        if identity in above:
            problems.append(_loop(folder))
            return
        yield from _matching(folder, rest, (), problems) if rest else found
        for each in found:
            yield from _matching(each, parts, (*above, identity), problems)
    elif not rest:
        yield from found
    else:
        for each in found:
            yield from _matching(each, rest, (), problems)


def _entries(folder: Path, part: str) -> list[Path]:
    """Returns the entries of a folder whose name one part of a pattern matches."""
    if glob.has_magic(part):
        names = [each for each in folder.iterdir() if part.startswith(".") or not each.name.startswith(".")]
        return [each for each in names if part == "**" or fnmatch.fnmatchcase(each.name, part)]
    try:
        (folder / part).lstat()
    except FileNotFoundError:
        return []
    return [folder / part]


def _walk(path: Path, above: tuple[tuple[int, int], ...], problems: list[Problem]) -> Iterator[Path]:
    """Yields a file, or the files below a folder sorted by name; ``above`` identifies the folders around it."""
    try:
        status = path.stat()
        inside = sorted(path.iterdir()) if stat.S_ISDIR(status.st_mode) else None
    except OSError as error:
        problems.append(_unreadable(path, error))
        return
    if inside is None:
        if stat.S_ISREG(status.st_mode):
            yield path
        else:
            todo = "remove it, or name the other files as --input"
            problems.append(Problem(printable(path), "is neither a file nor a folder", "", todo))
        return
    identity = status.st_dev, status.st_ino
    if identity in above:
        problems.append(_loop(path))
        return
    for each in inside:
        if not each.name.startswith(".") and each.name != SUMS:
            yield from _walk(each, (*above, identity), problems)


def _loop(path: Path) -> Problem:
    return Problem(printable(path), "is a link to a folder that it is in", "", "remove the link")


def _unreadable(path: Path, error: OSError) -> Problem:
    if path.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP):
        todo = "remove the link, or restore its file"
        return Problem(printable(path), "is a link to a missing file", printable(path.readlink()), todo)
    return Problem(printable(path), "cannot be read", reason_of(error), TODO_INPUT)


def kind_of_name(name: str, otherwise: Kind) -> Kind:
    """Returns the kind by the file's suffix, not counting that of a compression, or ``otherwise``."""
    path = Path(name.lower())
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    return _SUFFIXES.get(suffix, otherwise)
