"""``tridock data inspect``: counts, document lengths and samples. Reads the index once, and the tokens of samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class Bar:
    """Number of lengths from ``first`` to ``last``, inclusive."""

    first: int
    last: int
    count: int


class Lengths:
    """Counts of non-negative lengths by size."""

    def __init__(self, blocks: Iterable[NDArray[Any]]) -> None:
        self._counts = Counter[int]()
        self.count = self.total = 0
        for lengths in blocks:
            sizes, counts = np.unique(lengths, return_counts=True)
            self._counts.update(dict(zip(sizes.tolist(), counts.tolist(), strict=True)))
            self.count += len(lengths)
            self.total += int(lengths.sum(dtype=np.int64))

    @property
    def min(self) -> int:
        return min(self._counts, default=0)

    @property
    def max(self) -> int:
        return max(self._counts, default=0)

    @property
    def mean(self) -> float:
        """Mean length; 0 without lengths."""
        return self.total / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """Returns the smallest length that at least ``share`` of all do not exceed; 0 without lengths."""
        sizes = sorted(self._counts)
        below = itertools.accumulate(self._counts[size] for size in sizes)
        return next((size for size, count in zip(sizes, below, strict=True) if count >= share * self.count), 0)

    def bars(self) -> list[Bar]:
        """Returns the histogram with a bar per power of two: 0, 1, 2-3, 4-7, …, without empty ends."""
        bits = Counter[int]()
        for size, count in self._counts.items():
            bits[size.bit_length()] += count
        used = range(min(bits), max(bits) + 1) if bits else ()
        return [Bar(1 << it >> 1, (1 << it) - 1, bits[it]) for it in used]


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


def inspect(prefix: Path, samples: int, tokenizer: BytePairTokenizer | None, known: Sequence[str] = ()) -> Inspection:
    """Reads a data set. The ``samples`` documents are spread over it, and the same each time.

    ``known`` are the SHA-256 of the tokenizer, by the ways to read its file.
    Raises :class:`RequestError` if there is no data set, if its files do not fit together, or if its index is damaged.
    """
    dataset = IndexedDataset(prefix)
    RequestError.raise_for(index_problems(dataset))
    manifest = read_manifest(prefix)
    return Inspection(
        prefix=prefix,
        dtype=dataset.dtype.name,
        tokens=len(dataset.tokens),
        bin_bytes=dataset.tokens.nbytes,
        idx_bytes=dataset.path.stat().st_size,
        documents=Lengths(_document_lengths(dataset)),
        empty_documents=sum(int((counts == 0).sum()) for counts in _sequences_of_documents(dataset)),
        sequences=Lengths(in_blocks(dataset.lengths)),
        manifest=manifest,
        samples=tuple(_samples(dataset, samples, tokenizer)),
        notes=tuple(_notes(dataset, manifest, tokenizer, known)),
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
    dataset: IndexedDataset, manifest: DatasetManifest | None, tokenizer: BytePairTokenizer | None, known: Sequence[str]
) -> Iterator[str]:
    if manifest is None:
        return
    path = manifest_path(dataset.prefix)
    if manifest.tokens != len(dataset.tokens) or manifest.documents != dataset.documents:
        yield f"{path} belongs to other data: it counts {manifest.documents} documents and {manifest.tokens} tokens"
    if tokenizer is not None and manifest.tokenizer_sha256 not in (known or (tokenizer.sha256,)):
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
        "samples": [asdict(one) for one in found.samples],
        "notes": list(found.notes),
    }


def _lengths_as_json(lengths: Lengths) -> dict[str, Any]:
    bars = [asdict(bar) for bar in lengths.bars()]
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
        ("vocabulary", f"{manifest.vocab_size:,} tokens, tokenizer {manifest.tokenizer_sha256[:12] or 'unknown'}"),
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
