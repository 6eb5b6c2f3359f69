"""Checks that an experiment's data and tokenizer match it. The caller reads the files."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tridock.contracts.pretrained import HF, StoredWeights
from tridock.errors import Problem
from tridock.experiment.schema import Experiment
from tridock.experiment.weights import model_parameters

IMAGE_SUFFIXES = ("_images.npy", "_labels.npy")
"""File name endings after ``data.data_path`` for an image model."""

TOKENIZER: Final = "tokenizer.json"


def tokenizer_folders(experiment: Experiment) -> tuple[str, ...]:
    """Returns where a run looks for its tokenizer: the transformers folder of its weights, or beside its data."""
    if experiment.train.pretrained is not None and experiment.train.pretrained[0] == HF:
        return (experiment.train.pretrained[1],)
    beside = posixpath.dirname(experiment.data.data_path)
    return (beside or ".", posixpath.join(beside, "tokenizer"))


def weights_problems(experiment: Experiment, stored: StoredWeights, tokens: int | None) -> Iterator[Problem]:
    """Yields differences between the weights of ``train.load: FORMAT:DIR`` and the experiment's model.

    ``tokens`` is the size of its vocabulary, if known.
    """
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    sizes = {"max_position_embeddings": model.positions, "ffn_hidden_size": model.ffn_size}
    differs = False
    for name, there in stored.fields.items():
        here = sizes.get(name, getattr(model, name))
        if here not in (there, None):
            differs = True
            yield Problem(
                f"model.{name}", f"the weights of train.load have {there}", str(here), f"set it to {there}", (there,)
            )
    if differs or tokens is None or stored.parameters is None:
        return
    here = model_parameters(model, tokens)
    if here != stored.parameters:
        what = f"the weights of train.load have {stored.parameters:,} parameters, the experiment's model another number"
        yield Problem("model", what, f"{here:,}", "change its fields until the plan shows as many")


def data_problems(
    experiment: Experiment, manifest: Mapping[str, Any] | None, tokenizer: int | None
) -> Iterator[Problem]:
    """Yields a problem if the vocabulary or the sequence length does not match the data.

    ``manifest`` is the content of ``<data_path>.json``. Megatron's own tools write none; then the ranks find a mismatch
    only when they read the data. ``tokenizer`` is the number of tokens in ``data.vocab_file``, if the engine reads it.
    """
    tokens, total = (manifest.get(name) if isinstance(manifest, Mapping) else None for name in ("vocab_size", "tokens"))
    if tokens is not None and tokenizer is not None and tokens != tokenizer:
        # With a smaller vocabulary the embedding fails on an index; a larger one belongs to another tokenizer.
        todo = "name the files of the tokenizer that made the data"
        yield Problem("data.vocab_file", f"the data was made with {tokens} tokens", f"{tokenizer} tokens", todo)
    given = experiment.model.vocab_size
    if tokens is not None and given is not None and given < tokens:
        what = f"is smaller than the tokenizer of the data, which has {tokens} tokens"
        yield Problem("model.vocab_size", what, str(given), "leave it out, or raise it")
    if total is not None and total <= experiment.model.seq_length:
        what, todo = f"is longer than all of the data, {total} tokens", "lower it, or name a larger data set"
        yield Problem("model.seq_length", what, str(experiment.model.seq_length), todo)
