"""Small data sets with manifests, for the tests of what looks after data."""

from pathlib import Path
from typing import Any

from tests.unit.data.test_indexed_dataset import write
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import DatasetManifest, Input, write_manifest

END = 999
INPUT = Input(name="a.jsonl", bytes=7, sha256="ab" * 32)


def make(prefix: Path, documents: list[list[int]], /, **facts: Any) -> Path:
    """Documents closed by END where they have tokens, and a manifest; ``facts`` replace the manifest's."""
    closed = [[*document, END] if document else [] for document in documents]
    write(prefix, closed)
    dataset = IndexedDataset(prefix)
    known = {
        "vocab_size": 1000,
        "documents": len(documents),
        "tokens": len(dataset.tokens),
        "tokenizer_sha256": "cd" * 32,
        "end_of_document": END,
        "inputs": (INPUT,),
        "sequences": len(dataset),
        "versions": {"tridock": "0.1.0"},
    }
    write_manifest(prefix, DatasetManifest(**(known | facts)))
    return prefix


def content(prefix: Path) -> tuple[bytes, bytes]:
    """The bytes of both files."""
    return prefix.with_name(prefix.name + ".bin").read_bytes(), prefix.with_name(prefix.name + ".idx").read_bytes()
