"""An inspection for people (a table, a histogram, samples) and for programs (JSON)."""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tridock.data.dataset.inspect import SAMPLE_TOKENS, Inspection, Sample
from tridock.data.dataset.lengths import Lengths

_QUANTILES: Final = (("p5", 0.05), ("median", 0.5), ("p95", 0.95))
_BAR: Final = 40


def as_json(found: Inspection) -> dict[str, Any]:
    """All of it, for `--json`."""
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
    """The same for people."""
    console.print(Text(str(found.prefix), style="bold"), soft_wrap=True)
    for name, value in _facts(found):
        console.print(Text.assemble((f"  {name:<11}", "dim"), value), soft_wrap=True)
    console.print(_table(found))
    console.print(_histogram(found.documents))
    for sample in found.samples:
        console.print(_sample(sample), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"  note: {note}", style="yellow"), soft_wrap=True)


def _facts(found: Inspection) -> list[tuple[str, str]]:
    documents, sequences = found.documents.count, found.sequences.count
    facts = [
        ("documents", f"{documents:,} ({found.empty_documents:,} empty) in {sequences:,} sequences"),
        ("tokens", f"{found.tokens:,} of {found.dtype}"),
        ("files", f".bin {_size(found.bin_bytes)}, .idx {_size(found.idx_bytes)}"),
    ]
    manifest = found.manifest
    if manifest is None:
        return [*facts, ("manifest", "none: vocabulary, end of document and inputs are not known")]
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
        # A few among millions are still seen.
        width = max(round(_BAR * bar.count / tallest), 1 if bar.count else 0)
        table.add_row(f"    {name}", Text("█" * width, style="cyan"), f"{bar.count:,}")
    return table


def _sample(sample: Sample) -> Text:
    head = f"  document {sample.document:,} ({sample.tokens:,} tokens): "
    body = " ".join(map(str, sample.ids)) if sample.text is None else _safe(sample.text)
    more = " …" if sample.tokens > SAMPLE_TOKENS else ""
    return Text.assemble((head, "dim"), body + more)


def _safe(text: str) -> str:
    """Nothing in a text may steer the terminal."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _size(count: int) -> str:
    for power, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count} bytes"
