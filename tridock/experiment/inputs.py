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
    sizes = {
        "max_position_embeddings": model.positions,
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_size,
        "activation_func": model.gelu,
    }
    pairs = {name: (there, sizes.get(name, getattr(model, name))) for name, there in stored.fields.items()}
    if tokens is None:
        pairs.pop("vocab_size", None)
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (there, here) in differing.items():
        want = _yaml(there)
        yield Problem(
            f"model.{name}", f"the weights of train.load have {want}", _yaml(here), f"set it to {want}", (want,)
        )
    if tokens is None:
        return
    if stored.rows is not None:
        multiple = max(stored.rows_divisible_by, model.make_vocab_size_divisible_by)
        if not tokens <= stored.rows < tokens + multiple:
            what = f"the token table of train.load has {stored.rows:,} rows, with a padding of less than {multiple:,}"
            yield Problem("model.vocab_size", what, f"{tokens:,}", "use data of the tokenizer that the weights go with")
    if not differing and stored.parameters not in (None, here := model_parameters(model, tokens)):
        what = f"the weights of train.load have {stored.parameters:,} parameters, the experiment's model another number"
        yield Problem("model", what, f"{here:,}", "change its fields until the plan shows as many")


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
