"""The samples of train, valid and test of a run's data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridock.contracts.data_index import SPLITS, Part, split_bounds
from tridock.contracts.tokenizers import TOKENIZER_SHA256
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.errors import RequestError
from tridock.experiment.data_sets import DataSet
from tridock.experiment.inputs import blend_problems, data_problems, parts_problems
from tridock.experiment.schema import Experiment
from tridock.train.data.blend import BlendedSamples
from tridock.train.data.dataset import Numbered, Samples, mixed_seed

Make = Callable[[str, str, int, int], Samples]
"""Returns the samples of a split, by its name, the prefix of a data set, the number of its part in it, and a seed."""


@dataclass(frozen=True)
class Source:
    """A data set that is read, and the documents in it at which its parts begin and end."""

    dataset: IndexedDataset
    bounds: tuple[int, ...]

    def tokens(self, part: int) -> tuple[int, int]:
        """Returns the range of the tokens of its part for training (0), validation (1) or test (2)."""
        return self.dataset.token_bounds(self.bounds[part], self.bounds[part + 1])

    @property
    def parts(self) -> list[Part]:
        ranges = map(self.tokens, range(len(SPLITS)))
        return [Part(self.bounds[n + 1] - self.bounds[n], last - first) for n, (first, last) in enumerate(ranges)]


def read_sources(experiment: Experiment, workspace: Path) -> tuple[dict[str, Source], int]:
    """Returns the run's data sets by prefix, and the size of the vocabulary: ``model.vocab_size``, or their manifests'.

    Raises :class:`RequestError` if one is missing, too small, of another tokenizer, or does not fit the experiment.
    """
    data, sources, found = experiment.data, dict[str, Source](), dict[str, dict[str, Any] | None]()
    for prefix in data.prefixes:
        dataset = IndexedDataset(workspace / prefix)
        manifest = read_manifest(dataset.prefix)
        keys = {"vocab_size", "tokens", TOKENIZER_SHA256}
        found[prefix] = None if manifest is None else manifest.model_dump(include=keys)
        RequestError.raise_for(data_problems(experiment, prefix, found[prefix], None, len(dataset.tokens)))
        sources[prefix] = Source(dataset, split_bounds(dataset.documents, data.shares))
    RequestError.raise_for(blend_problems(found))
    RequestError.raise_for(parts_problems(experiment, {prefix: it.parts for prefix, it in sources.items()}))
    first = found[data.prefix]
    return sources, experiment.model.vocab_size or int((first or {})["vocab_size"])


def make_splits(experiment: Experiment, make: Make) -> dict[str, Numbered]:
    """Returns the samples of train, valid (or valid/NAME, if its data have names) and test, blended of what ``make``
    returns."""
    data, splits = experiment.data, dict[str, Numbered]()
    named = ((number, own, sets) for number in range(3) for own, sets in data.named_sets(number).items())
    for number, own, sets in named:
        name = "/".join(filter(None, (SPLITS[number], own)))
        # A data set that is not divided is all in its first part; the last one is empty.
        part = number if data.is_divided else 0 if sets else len(SPLITS) - 1
        seed = mixed_seed(experiment.train.seed, number)
        seeds = [seed, *(mixed_seed(seed, other) for other in range(1, len(sets)))]
        sets = sets or (DataSet(data.prefix),)
        made = [make(name, it.prefix, part, one) for it, one in zip(sets, seeds, strict=True)]
        splits[name] = first = made[0]
        if len(made) > 1:
            splits[name] = BlendedSamples(name, first.seq_length, first.vocab_size, seed, sets, tuple(made))
    return splits


def load_splits(experiment: Experiment, workspace: Path) -> dict[str, Numbered]:
    """Returns the samples of train, valid and test. Raises as :func:`read_sources`."""
    sources, vocab_size = read_sources(experiment, workspace)

    def make(name: str, prefix: str, part: int, seed: int) -> Samples:
        first, last = sources[prefix].tokens(part)
        tokens = sources[prefix].dataset.tokens[first:last]
        return Samples(name, tokens, experiment.model.seq_length, vocab_size, seed)

    return make_splits(experiment, make)
