"""``tridock data verify``: a data set gone through whole, and every place where it is not what it says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tridock.data.dataset.index_checks import index_problems
from tridock.data.dataset.indexed_dataset import Index, bin_path, check_presence, idx_path, wrong_size
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, read_manifest
from tridock.data.dataset.token_scan import Progress, TokenScan, ends_of_documents
from tridock.errors import Problem, RequestError

_COPY_ALL: Final = "copy all three files again, or make them again with `tridock data preprocess`"


@dataclass(slots=True)
class Verified:
    """What was looked at and what was found. ``str()`` is for the user."""

    prefix: Path
    problems: list[Problem] = field(default_factory=list)
    facts: str = ""
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        left = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        return f"{self.prefix}: {self.facts}; checked: {', '.join(self.checked)}{left}"


def verify(prefix: Path, vocab_size: int | None = None, progress: Progress | None = None) -> Verified:
    """Goes through both files once. ``vocab_size`` None: the manifest's.

    Memory is a few blocks, whatever the size of the data.
    """
    found = Verified(prefix)
    try:
        _look(found, vocab_size, progress)
    except OSError as error:
        todo = "make it readable for this user, or copy it again"
        found.problems.append(
            Problem(str(error.filename or prefix), "cannot be read", error.strerror or str(error), todo)
        )
    return found


def _look(found: Verified, vocab_size: int | None, progress: Progress | None) -> None:
    prefix, manifest = found.prefix, _manifest(found)
    try:
        check_presence(prefix)
        index = Index(idx_path(prefix))
    except RequestError as error:
        found.problems += error.problems
        return
    data = bin_path(prefix)
    damage = index_problems(index)
    if (size := data.stat().st_size) != index.promised:
        damage.append(wrong_size(data, index.promised, size))
    found.problems += damage
    found.checked.append("structure")
    _counts(found, index, manifest, size)
    scan = TokenScan(index, data, None if damage else ends_of_documents(index), vocab_size, manifest)
    scan.run(progress)
    found.problems += scan.problems()
    if scan.vocab_size is None:
        found.unchecked.append("upper bound of the tokens (no --vocab-size)")
    else:
        found.checked.append(f"tokens below {scan.vocab_size}")
    if scan.closing is not None and not damage:
        found.checked.append(f"token {scan.closing} at the end of every document")
    _hashes(found, index, manifest, scan.sha256)


def _manifest(found: Verified) -> DatasetManifest | None:
    try:
        manifest = read_manifest(found.prefix)
    except RequestError as error:
        found.problems += error.problems
        return None
    if manifest is None:
        found.unchecked.append(f"counts, checksums, ends of documents ({manifest_path(found.prefix)} is not there)")
    return manifest


def _counts(found: Verified, index: Index, manifest: DatasetManifest | None, size: int) -> None:
    documents, sequences, tokens = len(index.document_index) - 1, len(index.lengths), size // index.dtype.itemsize
    found.facts = f"{documents:,} documents, {sequences:,} sequences, {tokens:,} tokens of {index.dtype.name}"
    if manifest is None:
        return
    path = manifest_path(found.prefix)
    for name, promised, there in (
        ("documents", manifest.documents, documents),
        ("sequences", manifest.sequences, sequences),
        ("tokens", manifest.tokens, tokens),
    ):
        if promised is not None and promised != there:
            found.problems.append(Problem(str(path), f"counts {promised} {name}", f"{there} in the files", _COPY_ALL))
    found.checked.append("counts")


def _hashes(found: Verified, index: Index, manifest: DatasetManifest | None, bin_sha256: str) -> None:
    if manifest is None:
        return
    promised = (manifest.bin_sha256, manifest.idx_sha256)
    for path, expected in zip((bin_path(found.prefix), index.path), promised, strict=True):
        if expected is None:
            found.unchecked.append(f"checksum of {path.suffix} (the manifest has none)")
            continue
        actual = bin_sha256 if path.suffix == ".bin" else _sha256(path)
        if actual != expected:
            what = f"is not the file of which {manifest_path(found.prefix).name} holds the sha256 {expected}"
            found.problems.append(Problem(str(path), what, actual, _COPY_ALL))
        found.checked.append(f"checksum of {path.suffix}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
