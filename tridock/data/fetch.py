"""Downloads named files and addresses: resumes interrupted downloads, prefers mirrors, checks SHA-256.

The expected hash of a file is the given one, that of a known file, or its line in ``SHA256SUMS`` beside it. Without
any of these, the first download records its hash there, and every later one must match it.
"""

import errno
import fcntl
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tridock.contracts.environment import DATA_MIRRORS
from tridock.contracts.run_folder import write_atomic
from tridock.data.digest import SUMS, sha256_of
from tridock.data.progress import Done, Progress
from tridock.errors import Problem, RequestError, reason_of

_BLOCK: Final = 1 << 20
_TIMEOUT_S: Final = 60.0
_PAUSES_S: Final = (1.0, 3.0, 10.0)
"""Pause before each new attempt of an interrupted download."""
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file: its sources, its local name, and its SHA-256 if known."""

    url: str
    name: str
    sha256: str | None = None


_GPT2: Final = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
KNOWN: Final[Mapping[str, tuple[Wanted, ...]]] = {
    "gpt2": (
        Wanted(
            f"{_GPT2}/encoder.json",
            "gpt2-vocab.json",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        ),
        Wanted(
            f"{_GPT2}/vocab.bpe", "gpt2-merges.txt", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
        ),
    )
}
"""Known groups of files by name."""


class _CutOffError(Exception):
    """An interrupted download that may be continued."""


def wanted_files(sources: Sequence[str], sha256: str | None) -> list[Wanted]:
    """Returns the files of names and addresses. Raises :class:`RequestError` with all problems."""
    found: list[Wanted] = []
    problems: list[Problem] = []
    for source in sources:
        address = urllib.parse.urlsplit(source)
        name = Path(urllib.parse.unquote(address.path)).name
        if source in KNOWN:
            found.extend(KNOWN[source])
        elif address.scheme not in ("http", "https") or not name or name == SUMS or name.startswith("."):
            todo = f"give http(s)://…/FILE, or a known name: {', '.join(KNOWN)}"
            problems.append(Problem("SOURCE", "is not the URL of a file", repr(source), todo))
        else:
            found.append(Wanted(source, name, sha256))
    twice = sorted({one.name for one in found if sum(one.name == other.name for other in found) > 1})
    problems += [Problem("SOURCE", "is the name of two files", name, "fetch them to two folders") for name in twice]
    if sha256 is not None and (len(sources) > 1 or sources[0] in KNOWN):
        problems.append(Problem("--sha256", "is the hash of one file", " ".join(sources), "give one URL"))
    if sha256 is not None and not _HASH.fullmatch(sha256):
        problems.append(Problem("--sha256", "is not a SHA-256", repr(sha256), "give 64 hexadecimal digits"))
    RequestError.raise_for(problems)
    return found


def fetch(
    files: Iterable[Wanted], folder: Path, mirrors: Sequence[str], progress: Progress, say: Callable[[str], None]
) -> None:
    """Downloads the files into the folder. Raises :class:`RequestError` with the problems of all that failed."""
    schemes = [mirror for mirror in mirrors if "://" in mirror and not mirror.startswith(("http://", "https://"))]
    if schemes:
        todo = "give a folder, or http(s)://…"
        raise RequestError(
            [Problem("--mirror", "is neither a folder nor a URL", repr(mirror), todo) for mirror in schemes]
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(Problem("--folder", "cannot be created", str(folder), reason_of(error))) from None
    problems: list[Problem] = []
    for one in files:
        try:
            say(_fetch(one, folder, mirrors, progress))
        except RequestError as error:
            problems += error.problems
    RequestError.raise_for(problems)


def _fetch(one: Wanted, folder: Path, mirrors: Sequence[str], progress: Progress) -> str:
    target, sums = folder / one.name, _read_sums(folder / SUMS)
    expected = one.sha256 or sums.get(one.name)
    if target.exists():
        found = sha256_of(target)
        if expected not in (None, found):
            what, todo = f"has another content than SHA-256 {expected}", "remove it to fetch it again"
            raise RequestError(Problem(str(target), what, found, todo))
        _record(folder, one.name, found)
        return f"{target}: already here, SHA-256 {found}"
    problems: list[Problem] = []
    for source in (*(f"{mirror.rstrip('/')}/{one.name}" for mirror in mirrors), one.url):
        with _part_file(folder / f".{one.name}.part") as (file, part):
            try:
                _complete(source, file, part, expected, progress)
                found = sha256_of(part)
                if expected not in (None, found):
                    file.truncate(0)
                    what, todo = f"has another content than SHA-256 {expected}", f"name another source of {one.name}"
                    raise RequestError(Problem(_source_name(source), what, found, todo))
            except RequestError as error:
                problems += error.problems
                continue
            part.rename(target)
            _origin(part).unlink(missing_ok=True)
        _record(folder, one.name, found)
        how = "as expected" if expected else f"recorded in {folder / SUMS}: compare it with its publisher's"
        return f"{target}: {target.stat().st_size:,} bytes from {_source_name(source)}, SHA-256 {found}, {how}"
    todo = f"see above, name a mirror with --mirror or {DATA_MIRRORS}, or copy the file there yourself"
    raise RequestError([*problems, Problem(str(target), "no source has it", "", todo)])


@contextmanager
def _part_file(part: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Opens the partial file for this process alone; removes a wrong one."""
    todo = "make the folder writable, or name another with --folder"
    with RequestError.in_place_of(OSError, part, "cannot be written", todo):
        file = os.fdopen(os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_part = os.path.samestat(os.fstat(file.fileno()), part.stat())  # else it was whole before the lock
        except OSError:
            is_part = False
        if not is_part:
            todo = "wait for the other tridock data fetch"
            raise RequestError(Problem(str(part), "is being written", "another process", todo)) from None
        try:
            yield file, part
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()
                _origin(part).unlink(missing_ok=True)


def _complete(source: str, file: BinaryIO, part: Path, expected: str | None, progress: Progress) -> None:
    """Completes the partial file from a source. Raises :class:`RequestError`; the bytes received so far stay."""
    try:
        if "://" in source:
            _download(source, file, part, expected, progress)
        else:
            file.truncate(0)
            _origin(part).unlink(missing_ok=True)
            with Path(source).open("rb") as copied:
                shutil.copyfileobj(copied, file, _BLOCK)
                file.flush()
    except OSError as error:
        todo = "free space there" if error.errno == errno.ENOSPC else "name another mirror"
        where = str(part) if error.errno == errno.ENOSPC else _source_name(source)
        raise RequestError(Problem(where, "cannot be copied", reason_of(error), todo)) from None


def _download(source: str, file: BinaryIO, part: Path, expected: str | None, progress: Progress) -> None:
    address, validator = _read_origin(part)
    continued = file.seek(0, 2) > 0 and (expected is not None or (address == source and validator != ""))
    for pause in (*_PAUSES_S, None):
        before = file.seek(0, 2)
        try:
            _receive(source, file, part, progress, continued=continued)
            if expected is None or not continued or sha256_of(part) == expected:
                return
            continued = False  # the beginning belongs to another file
        except _CutOffError as cut:
            if pause is None:
                todo = "run it again to resume"
                raise RequestError(Problem(_source_name(source), "was cut off", str(cut), todo)) from None
            if file.seek(0, 2) <= before:
                time.sleep(pause)
            continued = True


def _receive(source: str, file: BinaryIO, part: Path, progress: Progress, *, continued: bool) -> None:
    """Appends the rest of the file, or rewrites it. Raises :class:`_CutOffError` or :class:`RequestError`."""
    start = file.seek(0, 2) if continued else 0
    headers = {"User-Agent": "tridock"}
    address, validator = _read_origin(part)
    if start:
        headers["Range"] = f"bytes={start}-"
        if validator and address == source:
            headers["If-Range"] = validator
    try:
        with urllib.request.urlopen(urllib.request.Request(source, headers=headers), timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http and https only
            if answer.status != http.client.PARTIAL_CONTENT:
                start = 0
                file.truncate(0)
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            write_atomic(_origin(part), f"{source}\n{tag}\n".encode())
            length = answer.headers.get("Content-Length")
            total = start + int(length) if length else 0
            while block := answer.read(_BLOCK):
                file.write(block)
                start += len(block)
                progress(Done(start, total, 0, 0))
            file.flush()
            if total and start < total:
                raise _CutOffError(f"{start:,} of {total:,} bytes")
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            file.truncate(0)
            raise _CutOffError(str(error)) from None
        if error.code in (http.client.TOO_MANY_REQUESTS, *range(500, 600)):
            raise _CutOffError(f"{error.code} {error.reason}") from None
        todo = "correct the URL, or name a mirror"
        raise RequestError(Problem(_source_name(source), "is refused", f"{error.code} {error.reason}", todo)) from None
    except urllib.error.URLError as error:
        todo = "check the network, the proxy (HTTPS_PROXY) and the certificates (SSL_CERT_FILE)"
        raise RequestError(Problem(_source_name(source), "cannot be reached", str(error.reason), todo)) from None
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        file.flush()
        raise _CutOffError(str(error) or type(error).__name__) from None


def _source_name(source: str) -> str:
    """Returns the source without the query, which may hold a signature or a token."""
    return source.partition("?")[0]


def _origin(part: Path) -> Path:
    return part.with_name(f"{part.name}.from")


def _read_origin(part: Path) -> tuple[str, str]:
    """Returns the source of the partial file, and a validator that shows whether that source is unchanged."""
    try:
        source, validator = _origin(part).read_text().splitlines()
    except (OSError, ValueError):
        return "", ""
    return source, validator


def _read_sums(path: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        rows = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip())
        return {row[1].lstrip("*"): row[0].lower() for row in rows if len(row) == 2}
    return {}


def _record(folder: Path, name: str, sha256: str) -> None:
    sums = _read_sums(folder / SUMS)
    if sums.get(name) != sha256:
        rows = sorted({**sums, name: sha256}.items())
        write_atomic(folder / SUMS, "".join(f"{digest}  {file}\n" for file, digest in rows).encode())
