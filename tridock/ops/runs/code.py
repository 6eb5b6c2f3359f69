"""Your code for a run: which files belong to it, and which of them each node lacks."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tridock.cluster.settings import STATE
from tridock.contracts import run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.files_below import open_below
from tridock.contracts.forms import NameBelow
from tridock.contracts.node_answers import CodeFile, PlacedCode
from tridock.contracts.records import read_object
from tridock.errors import Problem, RequestError, count, printable
from tridock.ops.outgoing import HEAD_BYTES, is_inside, open_real, secret
from tridock.ops.runs.provenance import git_output
from tridock.ops.runs.this_machine import ask_here, node_output

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE: Final = ".tridockignore"
_NEVER: Final = (".git/", "__pycache__/", ".venv/", "/runs/", f"{STATE}/")
_MOST_BYTES: Final = 500_000_000
_DIFF_BYTES: Final = 1_000_000
_EMPTY_FOLDER: Final = CodeFile(hashlib.sha256().hexdigest(), executable=False)


@dataclass(frozen=True, slots=True)
class Code:
    """The files of a folder, by their paths in it."""

    folder: Path
    files: Mapping[str, CodeFile]
    origin: Mapping[str, object]
    """The code's origin, for the run's manifest."""
    diff: bytes | None = None
    """The changes since the commit as ``git diff`` shows them; None if there are none or they are too long."""
    of_run: bool = False
    """Whether the folder is a run's, whose links lead nowhere. Yours may link to files elsewhere."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of the files that were read: a log may have grown since."""
    left_out: tuple[str, ...] = ()
    """What is there and is not sent, with the reason."""

    @property
    def index(self) -> str:
        """The index that ``place-code`` reads."""
        return encode(dict(self.files))

    @property
    def number(self) -> str:
        """How many files: ``3 files``."""
        return count(sum(not name.endswith("/") for name in self.files), "file")

    @property
    def note(self) -> str:
        """What was left out, as a line; empty if nothing was."""
        return f"not copied: {printable(', '.join(self.left_out))}" if self.left_out else ""

    @property
    def records(self) -> dict[str, bytes]:
        """The files of a run's folder that describe the code."""
        diff = {} if self.diff is None else {run_folder.CODE_DIFF: self.diff}
        return {run_folder.CODE_INDEX: self.index.encode(), **diff}

    def not_whole(self, missing: Iterable[str], where: str = "") -> RequestError:
        """Returns the error of files that have changed since they were read, by their SHA-256."""
        names = [name for name, it in self.files.items() if it.sha256 in set(missing)]
        got = ", ".join(names[:3]) + (f" and {count(len(names) - 3, 'other')}" if len(names) > 3 else "")
        todo = f"start it again, or name what changes by itself in {self.folder / IGNORE_FILE}"
        todo = "undo what has changed there" if self.of_run else todo
        return RequestError(Problem(str(self.folder), f"has files that changed after they were read{where}", got, todo))


def read_code(folder: Path) -> Code:
    """Returns the files of the folder to send, and its empty folders: in a git repository those that git does not
    ignore, else all; without caches, virtual environments, runs, keys, and what ``.tridockignore`` (in .gitignore's
    syntax) lists. Follows links that stay in the folder; leaves out other repositories, and what is no file or folder.

    Raises :class:`RequestError` if it is no folder, too large to be code, has a link that leads out of it, a name that
    is not UTF-8, or a file that looks like a secret and that neither git nor a ``!`` in ``.tridockignore`` knows.
    """
    if not folder.is_dir():
        todo = "give the program's folder: --workdir"
        raise RequestError(Problem(str(folder), "is not a folder with code", "", todo))
    try:
        return _read(folder)
    except OSError as error:
        todo = f"make it readable, or name it in {folder / IGNORE_FILE}"
        raise RequestError(Problem.of_error(error.filename or folder, "cannot be read", error, todo)) from None


def _read(folder: Path) -> Code:
    left_out: list[str] = []
    found = _found(folder, left_out)
    sizes = {name: place.stat().st_size for name, (place, _) in found.items() if not name.endswith("/")}
    if (total := sum(sizes.values())) > _MOST_BYTES:
        largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])
        got = f"{total / 1e9:.1f} GB; the largest files are {largest}"
        todo = f"name what is no code in {folder / IGNORE_FILE}, and copy data with tridock data sync"
        raise RequestError(Problem(str(folder), f"holds more than {_MOST_BYTES / 1e6:.0f} MB of code", got, todo))
    files: dict[str, CodeFile] = {}
    problems: list[Problem] = []
    own, root = folder / IGNORE_FILE, folder.resolve()
    for name, (place, is_known) in found.items():
        if name not in sizes:
            files[name] = _EMPTY_FOLDER
            continue
        with open_real(place) as file:
            looks = None if is_known else secret(str(place.relative_to(root)), file.read(HEAD_BYTES))
            file.seek(0)
            files[name] = CodeFile(hashlib.file_digest(file, "sha256").hexdigest(), os.access(place, os.X_OK))
            sizes[name] = file.tell()
        if looks is not None:
            todo = f"name it in {own}, or, to send it to every node, name it there as !/{_escaped(name)}"
            problems.append(Problem(str(folder / name), "looks like a secret, and git does not know it", looks, todo))
    RequestError.raise_for(problems)
    origin, diff = _origin(folder, files, total), _diff(folder, files)
    return Code(folder, files, origin, diff, sizes=sizes, left_out=tuple(left_out))


def _diff(folder: Path, files: Mapping[str, CodeFile]) -> bytes | None:
    """Returns the changes since the commit of the files to send, and which files are gone."""
    changed = git_output(folder, "diff", "--name-only", "-z", "--relative", "HEAD", "--", ".") or ""
    kept_back = [it for it in changed.split("\0") if it and it not in files and os.path.lexists(folder / it)]
    text = git_output(folder, "diff", "HEAD", "--", ".", *(f":(exclude,literal){name}" for name in kept_back))
    return f"{text}\n".encode(errors="surrogateescape") if text and len(text) <= _DIFF_BYTES else None


def _origin(folder: Path, files: Mapping[str, CodeFile], size: int) -> dict[str, object]:
    commit, status = (git_output(folder, *argv) for argv in (("rev-parse", "HEAD"), ("status", "--porcelain", ".")))
    return {
        "folder": str(folder.resolve()),
        "sha256": hashlib.sha256("".join(f"{it.sha256} {name}\n" for name, it in files.items()).encode()).hexdigest(),
        "files": len(files),
        "bytes": size,
        "git_commit": commit,
        "git_dirty": None if status is None else status != "",
    }


def code_of_run(run: Path) -> Code:
    """Returns the code that a run started with, from its folder. Raises :class:`RequestError` if it is unknown."""
    origin, diff = read_object(run / run_folder.MANIFEST).get("code"), None
    try:
        with open_below(run, run_folder.CODE_INDEX) as index:
            files = decode(dict[NameBelow, CodeFile], index.read())
        if not isinstance(origin, dict) or len(files) != origin.get("files"):  # a program in the image may have none
            raise ValueError("not what its manifest says")
        with suppress(FileNotFoundError), open_below(run, run_folder.CODE_DIFF) as file:
            diff = file.read(_DIFF_BYTES)
    except (OSError, ValueError) as error:
        todo = "fetch the run's folder whole: tridock fetch"
        raise RequestError(Problem(str(run / run_folder.CODE_INDEX), "cannot be read", str(error), todo)) from None
    return Code(run / run_folder.CODE_COPY, files, origin, diff, of_run=True)


def _found(folder: Path, left_out: list[str]) -> dict[str, tuple[Path, bool]]:
    """Returns the files and empty folders to send (these end in /), with each one's real path and whether git, or a
    ``!`` in the ignore file, knows it.

    ``left_out`` receives what is not sent, with the reason.
    """
    from pathspec import GitIgnoreSpec  # from the operator's environment; other engines' jobs do not need it

    ignored = GitIgnoreSpec.from_lines(_NEVER)
    own = folder / IGNORE_FILE
    listed = GitIgnoreSpec.from_lines(os.fsdecode(own.read_bytes()).splitlines() if own.is_file() else ())
    found: dict[str, tuple[Path, bool]] = {}
    problems: list[Problem] = []
    root = os.path.realpath(folder)
    candidates = dict(_candidates(folder, ignored))
    plain = {
        name: is_known
        for name, is_known in candidates.items()
        if not (folder / name).is_symlink() and not listed.check_file(name).include
    }
    for name in [it for it in candidates if (folder / it).is_symlink()]:
        inside = os.path.relpath(os.path.realpath(folder / name), root) + "/"
        if (folder / name).is_dir() and not f"{name}/".startswith(inside):
            # A link to a folder stands for its files, of which git may know.
            candidates |= {f"{name}/{it.removeprefix(inside)}": plain[it] for it in plain if it.startswith(inside)}
    for name in sorted(candidates):
        path = folder / name
        shown = f"{name.rstrip('/')}/" if path.is_dir() else name  # also a link to a folder
        named = listed.check_file(shown).include
        if ignored.match_file(shown) or named:
            continue
        place = os.path.realpath(path)
        real_name = os.path.relpath(place, root)
        if name != os.fsdecode(name.encode(errors="replace")):
            todo = f"rename it, or name it in {own} with a ? for each such byte"
            problems.append(
                Problem(str(folder), "has a file whose name is not UTF-8", repr(os.fsencode(name))[2:-1], todo)
            )
        elif not is_inside(place, root) or ignored.match_file(real_name):
            todo = f"copy there what it leads to, or name it in {own}; data go with tridock data sync"
            problems.append(Problem(str(path), "leads out of the folder's code by a link", place, todo))
        elif path.is_file():
            found[name] = Path(place), candidates.get(real_name, False) or named is False
        elif name.endswith("/") and not any(path.iterdir()):
            found[name] = Path(place), True
        elif not path.is_symlink() or not path.is_dir():
            kind = "a repository of its own" if path.is_dir() else "no file"
            left_out.append(f"{shown} ({kind})")
    RequestError.raise_for(problems)
    return found


def _candidates(folder: Path, ignored: GitIgnoreSpec) -> Iterator[tuple[str, bool]]:
    """Yields the paths of files, links and empty folders, and whether git knows each."""
    other = ("--others", "--exclude-standard")
    listed = (
        git_output(folder, "ls-files", "-z", *it) for it in (("--cached",), other, (*other, "--ignored", "--directory"))
    )
    tracked, others, unwanted = ({*text.split("\0")} - {""} if text is not None else None for text in listed)
    if tracked is not None and others is not None and unwanted is not None:
        yield from ((name, True) for name in tracked)
        yield from ((name, False) for name in others)
        # Neither what git ignores nor other repositories.
        closed = {*(name.rstrip("/") for name in tracked | others | unwanted)}
        yield from ((it, True) for it in _walk(folder, ignored, closed) if it.endswith("/"))
        return
    if any((parent / ".git").exists() for parent in (folder.resolve(), *folder.resolve().parents)):
        what, todo = "is in a git repository that git does not read", "correct what git status says there"
        raise RequestError(Problem(str(folder), what, "", f"{todo}: Tridock would send what git ignores"))
    yield from ((name, False) for name in _walk(folder, ignored))


def _walk(folder: Path, ignored: GitIgnoreSpec, closed: Collection[str] = ()) -> Iterator[str]:
    """Yields the paths of files, links and empty folders (these end in /); nothing below the ``closed`` folders."""
    for root, folders, names in os.walk(folder):
        inside = Path(root).relative_to(folder)
        if not folders and not names and inside.parts:
            yield f"{inside}/"
        links = [name for name in folders if Path(root, name).is_symlink()]
        below = {name: str(inside / name) for name in folders}
        folders[:] = [it for it, path in below.items() if path not in closed and not ignored.match_file(f"{path}/")]
        yield from (str(inside / name) for name in (*links, *names))


def _escaped(name: str) -> str:
    return re.sub(r"[\\*?\[ ]", r"\\\g<0>", name)


ARCHIVE_END: Final = bytes(2 * tarfile.BLOCKSIZE)


def archive_member(name: str, content: bytes) -> bytes:
    """Returns a file's part of a tar archive."""
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf() + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def archive_of(code: Code, contents: Iterable[str]) -> Iterator[bytes]:
    """Yields a tar archive of the files with these SHA-256, under them, in chunks. Leaves out a file that has changed
    since the code was read, or cannot be read: nothing else travels under its name."""
    names = {it.sha256: name for name, it in code.files.items()}
    for sha256 in names.keys() & set(contents):
        content, name = b"", names[sha256]
        with suppress(OSError), open_below(code.folder, name) if code.of_run else (code.folder / name).open("rb") as it:
            content = it.read(code.sizes.get(name, -1))
        if hashlib.sha256(content).hexdigest() == sha256:
            yield archive_member(sha256, content)
    yield ARCHIVE_END


def place_code(code: Code, folder: Path) -> None:
    """Writes the code to a run's folder on this machine."""
    place = partial(ask_here, PlacedCode, "place-code", str(folder), stdin=code.index.encode(), where=str(folder))
    if missing := place().missing:
        store = str(folder.parent / run_folder.CODE_STORE)
        node_output("receive-files", store, stdin=b"".join(archive_of(code, missing)), where=store)
        if missing := place().missing:
            raise code.not_whole(missing)
