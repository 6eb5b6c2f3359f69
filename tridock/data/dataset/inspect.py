"""``tridock data inspect``: counts, document lengths and samples. Reads the index once, and the tokens of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tridock.data.dataset.indexed_dataset import IndexedDataset, Tokens, in_blocks
from tridock.data.dataset.manifest import DatasetManifest, manifest_path, read_manifest
from tridock.data.dataset.verify import index_problems
from tridock.errors import RequestError

if TYPE_CHECKING:
    from tridock.data.tokenize.tokenizer import BytePairTokenizer

_FRACTION: Final = 12
"""Bits kept below the leading one: lengths share a bin only if they differ by less than 2**-12."""
_EXPONENTS: Final = 64
_BINS: Final = (_EXPONENTS << _FRACTION) + 1


@dataclass(frozen=True, slots=True)
class Bar:
    """Number of lengths from ``first`` to ``last``, inclusive."""

    first: int
    last: int
    count: int


class Lengths:
    """Counts of non-negative lengths by size, in little memory: exact up to 8192 tokens, above to 0.02 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self.count = 0
        self.total = 0
        self.min = 0
        self.max = 0

    def add(self, lengths: NDArray[Any]) -> None:
        """Adds a block of int64 lengths."""
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self.min = min(self.min, low) if self.count else low
        self.max = max(self.max, high)
        self.count += len(lengths)
        self.total += int(lengths.sum(dtype=np.int64))
        self._counts += np.bincount(_bins(lengths), minlength=_BINS)

    @property
    def mean(self) -> float:
        """Mean length; 0 without lengths."""
        return self.total / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """Returns the smallest length that at least ``share`` of all do not exceed; 0 without lengths."""
        if not self.count:
            return 0
        rank = max(1, int(np.ceil(share * self.count)))
        number = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(max(_smallest(number), self.min), self.max)

    def bars(self) -> list[Bar]:
        """Returns the histogram with a bar per power of two: 0, 1, 2-3, 4-7, …, without empty ends."""
        bars = [Bar(0, 0, int(self._counts[0]))]
        for exponent in range(_EXPONENTS - 1):
            begin = 1 + (exponent << _FRACTION)
            count = int(self._counts[begin : begin + (1 << _FRACTION)].sum())
            bars.append(Bar(1 << exponent, (2 << exponent) - 1, count))
        used = [number for number, bar in enumerate(bars) if bar.count]
        return bars[used[0] : used[-1] + 1] if used else []


def _bins(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Returns each length's bin number: 0 for 0, else from the exponent and leading bits of the length as a double."""
    bits = lengths.astype(np.float64).view(np.int64) >> (52 - _FRACTION)
    return np.where(lengths > 0, bits - (1023 << _FRACTION) + 1, 0)


def _smallest(number: int) -> int:
    if number == 0:
        return 0
    exponent, fraction = divmod(number - 1, 1 << _FRACTION)
    return -(-((1 << _FRACTION | fraction) << exponent) >> _FRACTION)


SAMPLE_TOKENS: Final = 64
"""Tokens per sample, from the start of its document."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The start of a document of ``tokens`` tokens. ``text`` is None without a tokenizer, or if it lacks an id."""

    document: int
    tokens: int
    ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """Figures of a data set. ``documents`` and ``sequences`` have their lengths in tokens; 0 for an empty document."""

    prefix: Path
    dtype: str
    tokens: int
    bin_bytes: int
    idx_bytes: int
    documents: Lengths
    empty_documents: int
    sequences: Lengths
    manifest: DatasetManifest | None
    samples: tuple[Sample, ...]
    notes: tuple[str, ...]

    @property
    def several_sequences(self) -> bool:
        return self.sequences.count != self.documents.count - self.empty_documents


def inspect(prefix: Path, samples: int, tokenizer: BytePairTokenizer | None) -> Inspection:
    """Reads a data set. The ``samples`` documents are spread over it, and the same each time.

    Raises :class:`RequestError` if there is no data set, if its files do not fit together, or if its index is damaged.
    """
    dataset = IndexedDataset(prefix)
    if problems := index_problems(dataset.index):
        raise RequestError(problems)
    documents, sequences, empty = Lengths(), Lengths(), 0
    for block in _document_lengths(dataset):
        documents.add(block)
    for block in in_blocks(dataset.lengths):
        sequences.add(block)
    for counts in _sequences_of_documents(dataset):
        empty += int((counts == 0).sum())
    manifest = read_manifest(prefix)
    return Inspection(
        prefix=prefix,
        dtype=dataset.dtype.name,
        tokens=len(dataset.tokens),
        bin_bytes=dataset.tokens.nbytes,
        idx_bytes=dataset.index.path.stat().st_size,
        documents=documents,
        empty_documents=empty,
        sequences=sequences,
        manifest=manifest,
        samples=tuple(_samples(dataset, samples, tokenizer)),
        notes=tuple(_notes(dataset, manifest, tokenizer)),
    )


def _sequences_of_documents(dataset: IndexedDataset) -> Iterator[Tokens]:
    last = 0
    for entries in in_blocks(dataset.document_index, 1):
        yield np.diff(entries, prepend=last)
        last = int(entries[-1])


def _document_lengths(dataset: IndexedDataset) -> Iterator[Tokens]:
    """Yields the tokens of each document, int64: from its first sequence to that of the next document."""
    width, last = dataset.dtype.itemsize, 0
    for entries in in_blocks(dataset.document_index, 1):
        inside = entries < len(dataset)
        ends = np.full(len(entries), len(dataset.tokens), np.int64)
        ends[inside] = dataset.offsets[entries[inside]] // width
        yield np.diff(ends, prepend=last)
        last = int(ends[-1])


def _samples(dataset: IndexedDataset, count: int, tokenizer: BytePairTokenizer | None) -> Iterator[Sample]:
    count = min(count, dataset.documents)
    for number in range(count):
        document = number * (dataset.documents - 1) // max(count - 1, 1)
        start, end = dataset.token_bounds(document, document + 1)
        ids = tuple(int(token) for token in dataset.tokens[start : min(end, start + SAMPLE_TOKENS)])
        known = tokenizer is not None and all(0 <= token <= tokenizer.largest_id for token in ids)
        text = tokenizer.decode(ids) if tokenizer is not None and known else None
        yield Sample(document, end - start, ids, text)


def _notes(
    dataset: IndexedDataset, manifest: DatasetManifest | None, tokenizer: BytePairTokenizer | None
) -> Iterator[str]:
    if manifest is None:
        return
    path = manifest_path(dataset.prefix)
    if manifest.tokens != len(dataset.tokens) or manifest.documents != dataset.documents:
        yield f"{path} belongs to other data: it counts {manifest.documents} documents and {manifest.tokens} tokens"
    if tokenizer is not None and tokenizer.sha256 != manifest.tokenizer_sha256:
        yield "this is not the tokenizer of the data: the texts may be wrong"


_QUANTILES: Final = (("p5", 0.05), ("median", 0.5), ("p95", 0.95))
_BAR: Final = 40


def as_json(found: Inspection) -> dict[str, Any]:
    """Returns the figures of a data set for JSON."""
    return {
        "prefix": str(found.prefix),
        "documents": found.documents.count,
        "empty_documents": found.empty_documents,
        "sequences": found.sequences.count,
        "tokens": found.tokens,
        "dtype": found.dtype,
        "bin_bytes": found.bin_bytes,
        "idx_bytes": found.idx_bytes,
        "document_lengths": _lengths_as_json(found.documents),
        "sequence_lengths": _lengths_as_json(found.sequences),
        "manifest": None if found.manifest is None else found.manifest.model_dump(),
        "samples": [
            {"document": one.document, "tokens": one.tokens, "ids": list(one.ids), "text": one.text}
            for one in found.samples
        ],
        "notes": list(found.notes),
    }


def _lengths_as_json(lengths: Lengths) -> dict[str, Any]:
    bars = [{"first": bar.first, "last": bar.last, "count": bar.count} for bar in lengths.bars()]
    quantiles = {name: lengths.quantile(share) for name, share in _QUANTILES}
    return {"min": lengths.min, **quantiles, "mean": lengths.mean, "max": lengths.max, "histogram": bars}


def print_inspection(found: Inspection, console: Console) -> None:
    """Prints the figures, the histogram and the samples of a data set."""
    console.print(Text(str(found.prefix), style="bold"), soft_wrap=True)
    for name, value in _facts(found):
        console.print(Text.assemble((f"  {name:<11}", "dim"), value), soft_wrap=True)
    console.print(_table(found))
    console.print(_histogram(found.documents))
    for sample in found.samples:
        console.print(_sample(sample), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"  note: {note}", style="dark_orange3"), soft_wrap=True)


def _facts(found: Inspection) -> list[tuple[str, str]]:
    documents, sequences = found.documents.count, found.sequences.count
    facts = [
        ("documents", f"{documents:,} ({found.empty_documents:,} empty) in {sequences:,} sequences"),
        ("tokens", f"{found.tokens:,} of {found.dtype}"),
        ("files", f".bin {_size(found.bin_bytes)}, .idx {_size(found.idx_bytes)}"),
    ]
    manifest = found.manifest
    if manifest is None:
        return [*facts, ("manifest", "none: vocabulary, end of document and inputs are unknown")]
    closing = manifest.end_of_document
    facts += [
        ("vocabulary", f"{manifest.vocab_size:,} tokens, tokenizer {manifest.tokenizer_sha256[:12]}"),
        ("ends", "no token ends a document" if closing is None else f"token {closing} ends every document"),
        ("inputs", _inputs(found)),
    ]
    if manifest.part is not None:
        facts.append(("part", manifest.part))
    if manifest.versions:
        facts.append(("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())))
    return facts


def _inputs(found: Inspection) -> str:
    assert found.manifest is not None
    inputs = found.manifest.inputs
    names = ", ".join(item.name for item in inputs[:3]) + (", …" if len(inputs) > 3 else "")
    size = _size(sum(item.bytes for item in inputs))
    return _safe(
        f"{len(inputs)} ({names}), {size}, key {found.manifest.json_key!r}; {found.manifest.rejected:,} rejected"
    )


def _table(found: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("  tokens")
    for name in ("min", "p5", "median", "mean", "p95", "max"):
        table.add_column(name, justify="right")
    rows = [("a document", found.documents)]
    if found.several_sequences:
        rows.append(("a sequence", found.sequences))
    for name, lengths in rows:
        p5, median, p95 = (f"{lengths.quantile(share):,}" for _, share in _QUANTILES)
        table.add_row(f"  {name}", f"{lengths.min:,}", p5, median, f"{lengths.mean:,.1f}", p95, f"{lengths.max:,}")
    return table


def _histogram(lengths: Lengths) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    bars = lengths.bars()
    tallest = max((bar.count for bar in bars), default=1)
    for bar in bars:
        name = f"{bar.first:,}" if bar.first == bar.last else f"{bar.first:,} to {bar.last:,}"
        # Keeps a few among millions visible.
        width = max(round(_BAR * bar.count / tallest), 1 if bar.count else 0)
        table.add_row(f"    {name}", Text("█" * width, style="cyan"), f"{bar.count:,}")
    return table


def _sample(sample: Sample) -> Text:
    head = f"  document {sample.document:,} ({sample.tokens:,} tokens): "
    body = " ".join(map(str, sample.ids)) if sample.text is None else _safe(sample.text)
    more = " …" if sample.tokens > SAMPLE_TOKENS else ""
    return Text.assemble((head, "dim"), body + more)


def _safe(text: str) -> str:
    """Escapes control characters, which could control the terminal."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _size(count: int) -> str:
    for power, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count} bytes"
