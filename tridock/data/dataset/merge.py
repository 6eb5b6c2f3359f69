"""``tridock data merge``: data sets one after another in one, the bytes of Megatron's ``tools/merge_datasets.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import DatasetManifest, manifest_path
from tridock.data.dataset.prefixes import open_whole
from tridock.data.dataset.slices import Output, Progress, Stretch, Written, write_outputs
from tridock.errors import Problem, RequestError


def merge(prefixes: Sequence[Path], output: Path, progress: Progress | None = None) -> tuple[Written, list[Path]]:
    """Writes ``output``; gives what lies there, and the manifests whose lack leaves it without one of its own.

    Raises :class:`RequestError` with every reason why they do not go together, before anything is written.
    """
    if problems := [*_twice(prefixes), *_onto_an_input(prefixes, output)]:
        raise RequestError(problems)
    datasets, manifests = open_whole(prefixes)
    if problems := [*_types(datasets), *_tokenizers(prefixes, manifests)]:
        raise RequestError(problems)
    known = [manifest for manifest in manifests if manifest is not None]
    missing = [manifest_path(prefix) for prefix, it in zip(prefixes, manifests, strict=True) if it is None]
    stretches = tuple(Stretch(dataset, 0, dataset.documents) for dataset in datasets)
    written = write_outputs([Output(output, stretches, None if missing else _together(known))], progress)
    return written[0], missing


def _twice(prefixes: Sequence[Path]) -> Iterator[Problem]:
    real = [prefix.resolve() for prefix in prefixes]
    for number, prefix in enumerate(prefixes):
        if real[number] in real[:number]:
            yield Problem(str(prefix), "is given twice", "", "give it once")


def _onto_an_input(prefixes: Sequence[Path], output: Path) -> Iterator[Problem]:
    if output.resolve() in [prefix.resolve() for prefix in prefixes]:
        yield Problem(
            "--output-prefix", "is one of the inputs", str(output), "choose another, or leave it out of --input"
        )


def _types(datasets: Sequence[IndexedDataset]) -> Iterator[Problem]:
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.dtype != first.dtype:
            what = f"has tokens of another type than {first.prefix}, which has {first.dtype.name}"
            yield Problem(str(dataset.prefix), what, dataset.dtype.name, "make them with one tokenizer")


def _tokenizers(prefixes: Sequence[Path], manifests: Sequence[DatasetManifest | None]) -> Iterator[Problem]:
    """What the manifests that are there say of the tokens has to be the same."""
    known = [(prefix, it) for prefix, it in zip(prefixes, manifests, strict=True) if it is not None]
    for prefix, it in known[1:]:
        first, its = known[0]
        if it.tokenizer_sha256 != its.tokenizer_sha256:
            what = f"was made with another tokenizer than {first}, whose sha256 is {its.tokenizer_sha256}"
            yield Problem(str(prefix), what, it.tokenizer_sha256, "make them with one tokenizer")
        elif it.vocab_size != its.vocab_size:
            what = f"has another vocabulary than {first}, which has {its.vocab_size} tokens"
            yield Problem(str(prefix), what, str(it.vocab_size), "make them with one tokenizer")
        elif it.end_of_document != its.end_of_document:
            what = f"closes its documents in another way than {first}, which {_closing(its)}"
            yield Problem(str(prefix), what, _closing(it), "make all of them with --append-eod, or none")


def _closing(manifest: DatasetManifest) -> str:
    closing = manifest.end_of_document
    return "has nothing there" if closing is None else f"has token {closing} there"


def _together(manifests: Sequence[DatasetManifest]) -> DatasetManifest:
    """The first's, with everyone's inputs (each once: parts of one data set have the same); counts come later."""
    versions: dict[str, list[str]] = {}
    for manifest in manifests:
        for name, version in manifest.versions.items():
            versions[name] = list(dict.fromkeys([*versions.get(name, []), version]))
    return manifests[0].model_copy(
        update={
            "inputs": tuple(dict.fromkeys(item for manifest in manifests for item in manifest.inputs)),
            "json_key": ", ".join(dict.fromkeys(manifest.json_key for manifest in manifests)),
            "rejected": sum(manifest.rejected for manifest in manifests),
            "versions": {name: ", ".join(found) for name, found in versions.items()},
            "part": None,
        }
    )
