"""``tridock data merge``: joins data sets; the bytes equal those of Megatron's ``tools/merge_datasets.py``."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import DatasetManifest, manifest_path
from tridock.data.dataset.prefixes import open_datasets
from tridock.data.dataset.slices import Output, Progress, Slice, Written, write_outputs
from tridock.errors import Problem, RequestError


def merge(prefixes: Sequence[Path], output: Path, progress: Progress | None = None) -> tuple[Written, list[Path]]:
    """Writes ``output``. Returns it, and the manifests whose absence leaves it without one.

    Raises :class:`RequestError` with all reasons against merging, before anything is written.
    """
    if problems := list(_name_problems(prefixes, output)):
        raise RequestError(problems)
    datasets, manifests = open_datasets(prefixes)
    RequestError.raise_for([*_types(datasets), *_tokenizers(prefixes, manifests)])
    known = [manifest for manifest in manifests if manifest is not None]
    missing = [manifest_path(prefix) for prefix, it in zip(prefixes, manifests, strict=True) if it is None]
    slices = tuple(Slice(dataset, 0, dataset.documents) for dataset in datasets)
    written = write_outputs([Output(output, slices, None if missing else _merge_manifests(known))], progress)
    return written[0], missing


def _name_problems(prefixes: Sequence[Path], output: Path) -> Iterator[Problem]:
    real = [prefix.resolve() for prefix in prefixes]
    for number, prefix in enumerate(prefixes):
        if real[number] in real[:number]:
            yield Problem(str(prefix), "is given twice", "", "give it once")
    if output.resolve() in real:
        todo = "choose another, or leave it out of --input"
        yield Problem("--output-prefix", "is one of the inputs", str(output), todo)


def _types(datasets: Sequence[IndexedDataset]) -> Iterator[Problem]:
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.dtype != first.dtype:
            what = f"has tokens of another type than {first.prefix}, which has {first.dtype.name}"
            yield Problem(str(dataset.prefix), what, dataset.dtype.name, "build them with one tokenizer")


def _tokenizers(prefixes: Sequence[Path], manifests: Sequence[DatasetManifest | None]) -> Iterator[Problem]:
    """Yields differences in tokenizer, vocabulary and end of document between the manifests."""
    known = [(prefix, it) for prefix, it in zip(prefixes, manifests, strict=True) if it is not None]
    for prefix, it in known[1:]:
        first, its = known[0]
        if it.tokenizer_sha256 != its.tokenizer_sha256:
            what = f"has another tokenizer than {first}, whose sha256 is {its.tokenizer_sha256}"
            yield Problem(str(prefix), what, it.tokenizer_sha256, "build them with one tokenizer")
        elif it.vocab_size != its.vocab_size:
            what = f"has another vocabulary than {first}, which has {its.vocab_size} tokens"
            yield Problem(str(prefix), what, str(it.vocab_size), "build them with one tokenizer")
        elif it.end_of_document != its.end_of_document:
            what = f"ends its documents differently from {first}, which ends them with {_closing(its)}"
            yield Problem(str(prefix), what, _closing(it), "build all of them with --append-eod, or none")


def _closing(manifest: DatasetManifest) -> str:
    closing = manifest.end_of_document
    return "no token" if closing is None else f"token {closing}"


def _merge_manifests(manifests: Sequence[DatasetManifest]) -> DatasetManifest:
    """Returns the first manifest with the inputs of all, each once. The counts are set when the data is written."""
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
