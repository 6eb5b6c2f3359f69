"""Checks that an experiment's data and tokenizer match it. The caller reads the files."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tridock.contracts.pretrained import DOWNLOAD, HF, StoredWeights
from tridock.errors import Problem
from tridock.experiment.megatron_weights import megatron_differences
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.experiment.transformers_weights import config_problems, weights_differences, yaml_value

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

    ``tokens`` is the size of its vocabulary, if known. Raises :class:`RequestError` for a model that is not supported.
    """
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    problems = (
        [] if stored.config is None else list(config_problems(model, stored.config, stored.config_folder, tokens))
    )
    problems = problems or list(_size_problems(model, stored))
    if not problems and stored.shapes:
        is_hf = experiment.train.pretrained is not None and experiment.train.pretrained[0] == HF
        todo = DOWNLOAD if is_hf else _OTHER_FIELDS
        given = model, tokens, stored.shapes, stored.aliases, stored.folder, todo
        problems = list(weights_differences(*given, exactly=not is_hf))
    if not problems and stored.parts:
        problems = list(megatron_differences(model, stored.rows or 0, stored.parts, stored.folder))
    yield from problems
    if tokens is not None and stored.rows is not None:
        multiple = max(stored.rows_divisible_by, model.make_vocab_size_divisible_by)
        if not tokens <= stored.rows < tokens + multiple:
            what = f"the token table of train.load has {stored.rows:,} rows, with a padding of less than {multiple:,}"
            yield Problem("model.vocab_size", what, f"{tokens:,}", "use data of the tokenizer that the weights go with")


_OTHER_FIELDS: Final = "change the model's fields, or use train.load: hf:DIR after save_pretrained"


def _size_problems(model: Model, stored: StoredWeights) -> Iterator[Problem]:
    """Yields the fields that the weights' shapes, or Megatron's arguments, have otherwise."""
    sizes = {
        "max_position_embeddings": model.positions,
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_size,
        "activation_func": model.gelu,
    }
    pairs = {name: (there, sizes.get(name, getattr(model, name))) for name, there in stored.fields.items()}
    if model.vocab_size is None:
        pairs.pop("vocab_size", None)
    for name, (there, here) in pairs.items():
        if there != here:
            want = yaml_value(there)
            what = f"the weights of train.load have {want}"
            yield Problem(f"model.{name}", what, yaml_value(here), f"set it to {want}", (want,))


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
