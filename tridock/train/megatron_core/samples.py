"""Samples of megatron-core's ``GPTDataset``, with the interface of the training loop.

Each epoch is a data set of its own, shuffled by (seed, split, epoch), so sample number n does not depend on the length
of the run. Every rank builds the indices in memory: nothing is written beside the data, and no folder has to be shared.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from tridock.experiment.schema import Experiment
from tridock.train.data.dataset import Numbered, Samples, mixed_seed
from tridock.train.data.splits import make_splits, read_sources


@dataclass(frozen=True)
class GPTSamples(Samples):
    """The samples of one split, in megatron-core's order."""

    indexed: Any = field(repr=False)
    sequences: NDArray[np.int32] = field(repr=False)
    _epochs: dict[int, GPTDataset] = field(default_factory=dict, repr=False)

    @cached_property
    def per_epoch(self) -> int:
        return 0 if super().per_epoch == 0 else len(self.epoch(0))

    def epoch(self, number: int) -> GPTDataset:
        """Returns the data set of one epoch. Caches two: a step uses no more, unless the data set is small."""
        if number not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = self._make(number)
        return self._epochs[number]

    def _make(self, number: int) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=mixed_seed(self.seed, number) >> 32,  # NumPy's seeds have 32 bits
            sequence_length=self.seq_length,
            tokenizer=SimpleNamespace(vocab_size=None, eod=-2, unique_identifiers={}),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache="",
            blend=([self.indexed.path_prefix], None),
            split="1,0,0",
        )
        return GPTDataset(self.indexed, self.indexed.path_prefix, self.sequences, None, Split.train, config)

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        epoch, position = divmod(number, self.per_epoch)
        record = self.epoch(epoch)[position]
        return self.checked(np.append(record["tokens"].numpy(), record["labels"].numpy()[-1]))


def gpt_splits(experiment: Experiment, workspace: Path) -> dict[str, Numbered]:
    """Returns the samples of train, valid and test in megatron-core's order. Raises as :func:`read_sources`."""
    sources, vocab_size = read_sources(experiment, workspace)

    @cache
    def opened(prefix: str) -> Any:
        return IndexedDataset(str(workspace / prefix))

    def make(name: str, prefix: str, part: int, seed: int) -> Samples:
        source, indexed = sources[prefix], opened(prefix)
        first, last = (int(indexed.document_indices[source.bounds[it]]) for it in (part, part + 1))
        tokens = source.dataset.tokens[slice(*source.tokens(part))]
        sequences = np.arange(first, last, dtype=np.int32)
        return GPTSamples(
            name, tokens, experiment.model.seq_length, vocab_size, seed, indexed=indexed, sequences=sequences
        )

    return make_splits(experiment, make)
