"""Whether the data and the tokenizer that an experiment names match it. The files are read elsewhere."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tridock.errors import Problem
from tridock.experiment.schema import Experiment

IMAGE_SUFFIXES = ("_images.npy", "_labels.npy")
"""After ``data.data_path``, of a model of images."""

TOKENIZER: Final = "tokenizer.json"


def tokenizer_folders(experiment: Experiment) -> tuple[str, ...]:
    """Where a run looks for its tokenizer: with the weights that it began with, or beside its data."""
    if experiment.train.pretrained_folder is not None:
        return (experiment.train.pretrained_folder,)
    beside = posixpath.dirname(experiment.data.data_path)
    return (beside or ".", posixpath.join(beside, "tokenizer"))


def data_problems(
    experiment: Experiment, manifest: Mapping[str, Any] | None, tokenizer: int | None
) -> Iterator[Problem]:
    """A vocabulary or a sequence that does not match the data.

    ``manifest`` is ``<data_path>.json``; without one (Megatron's own tools write none) nobody knows before the ranks
    read. ``tokenizer`` is the number of tokens in ``data.vocab_file``, where the engine reads it.
    """
    tokens, total = (manifest.get(name) if isinstance(manifest, Mapping) else None for name in ("vocab_size", "tokens"))
    if tokens is not None and tokenizer is not None and tokens != tokenizer:
        # A smaller one ends deep inside an embedding; a larger one is another.
        todo = "name the files of the tokenizer that made the data"
        yield Problem("data.vocab_file", f"the data was made with {tokens} tokens", f"{tokenizer} tokens", todo)
    given = experiment.model.vocab_size
    if tokens is not None and given is not None and given < tokens:
        what = f"is smaller than the tokenizer of the data, which has {tokens} tokens"
        yield Problem("model.vocab_size", what, str(given), "leave it out, or raise it")
    if total is not None and total <= experiment.model.seq_length:
        what, todo = f"is longer than all of the data, {total} tokens", "lower it, or name a larger data set"
        yield Problem("model.seq_length", what, str(experiment.model.seq_length), todo)
