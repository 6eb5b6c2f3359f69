"""Checks that an experiment's data and tokenizer match it. The caller reads the files."""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tridock.contracts.data_index import SPLITS, Part, split_bounds
from tridock.contracts.images import ImageArrays
from tridock.contracts.pretrained import CONFIG, HF, StoredWeights
from tridock.contracts.tokenizers import TOKENIZER_SHA256
from tridock.errors import Problem
from tridock.experiment.megatron_weights import megatron_differences
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.experiment.transformers_config import model_fields
from tridock.experiment.transformers_weights import weights_differences


def tokenizer_folders(experiment: Experiment) -> tuple[str, ...]:
    """Returns where a run looks for its tokenizer: the transformers folder of its weights, or beside its data."""
    if experiment.train.pretrained is not None and experiment.train.pretrained[0] == HF:
        return (experiment.train.pretrained[1],)
    beside = posixpath.dirname(experiment.data.prefix)
    return (beside or ".", posixpath.join(beside, "tokenizer"))


def weights_problems(model: Model, stored: StoredWeights, tokens: int | None) -> Iterator[Problem]:
    """Yields differences between the weights of ``train.load: FORMAT:DIR`` and the experiment's model.

    ``tokens`` is the size of its vocabulary, if known. Raises :class:`RequestError` for a model that is not supported.
    """
    model = model.model_copy(update={"vocab_size": tokens})
    problems = []
    if stored.config is not None:
        fields = model_fields(stored.config, f"{stored.config_folder}/{CONFIG}")
        problems = list(differences(model, fields, f"the model in {stored.config_folder} has"))
    problems = problems or list(differences(model, stored.fields, "the weights of train.load have"))
    if not problems and stored.shapes:
        problems = list(weights_differences(model, tokens, stored, _DESCRIBED if stored.config else _OTHER_FIELDS))
    if not problems and stored.parts:
        problems = list(megatron_differences(model, stored.rows or 0, stored.parts, stored.folder))
    yield from problems
    if tokens is not None and stored.rows is not None:
        multiple = max(stored.rows_divisible_by, model.make_vocab_size_divisible_by)
        if not tokens <= stored.rows < tokens + multiple:
            what = f"the token table of train.load has {stored.rows:,} rows, with a padding of less than {multiple:,}"
            yield Problem("model.vocab_size", what, f"{tokens:,}", "use data of the tokenizer that the weights go with")


_DESCRIBED: Final = (
    "download all of it, or name a folder whose every weight config.json describes, without adapters and quantization"
)
_OTHER_FIELDS: Final = "change the model's fields, or use train.load: hf:DIR after save_pretrained"


def differences(model: Model, fields: Mapping[str, Any], whose: str) -> Iterator[Problem]:
    """Yields the fields that a ``config.json``, the weights' shapes or Megatron's arguments have otherwise."""
    for name, there in fields.items():
        here = model.value_of(name)
        if name == "max_position_embeddings" and model.rotary_size and here <= there:
            continue  # without a position table, shorter samples use the same model
        if there != here and (name, here) != ("vocab_size", None):
            want = _yaml(there)
            yield Problem(f"model.{name}", f"{whose} {want}", _yaml(here), f"set it to {want}", (want,))


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parts_problems(
    experiment: Experiment, parts: Mapping[str, Sequence[Part]], *, whole_samples: bool = True
) -> Iterator[Problem]:
    """Yields the parts of the data sets (train, valid, test) that are needed and have less than one sample.

    ``parts``: those of each data set that could be read, by prefix. Without ``whole_samples``, yields those that have
    no token: an engine repeats the rest until it fills a sample.
    """
    data, fewest = experiment.data, experiment.model.seq_length + 1 if whole_samples else 1
    one = f"less than one sample of {fewest} tokens" if whole_samples else "no token"
    for number, name in enumerate(SPLITS[: 2 if experiment.train.eval_interval else 1]):
        for prefix in (it.prefix for it in data.sets(number) if it.prefix in parts):
            there = parts[prefix]
            part = there[number if data.is_divided else 0]
            if part.tokens < fewest:
                got = f"{part.tokens} tokens in {part.documents} of {sum(it.documents for it in there)} documents of"
                where, what = ("data.split", "leaves") if data.is_divided else (f"data.{name}_data_path", "gives")
                todo = "give it a larger share, use more text, or shorten model.seq_length"
                yield Problem(where, f"{what} the {name} split {one}", f"{got} {prefix}", todo)


def image_problems(experiment: Experiment, prefix: str, arrays: ImageArrays) -> Iterator[Problem]:
    """Yields what is wrong with images and labels, or else the parts (train, valid) that are needed and have none."""
    model, total = experiment.model, sum(arrays.images[1][:1])
    problems = list(arrays.problems(prefix, model.img_h or 0, model.img_w or 0, model.num_classes or 0))
    yield from problems
    bounds = split_bounds(total, experiment.data.split)
    for part, name in enumerate(SPLITS[: 2 if experiment.train.eval_interval else 1]):
        if not problems and bounds[part] == bounds[part + 1]:
            what, got = f"leaves the {name} split no image", f"{total} images in all"
            yield Problem("data.split", what, got, "give it a larger share")


def blend_problems(manifests: Mapping[str, object]) -> Iterator[Problem]:
    """Yields the data sets that another tokenizer made than the first one that says it.

    ``manifests``: their contents by prefix; Megatron's own tools write none.
    """
    refused = set[str]()
    for key in (TOKENIZER_SHA256, "vocab_size"):
        said = {prefix: it[key] for prefix, it in manifests.items() if isinstance(it, Mapping) and it.get(key)}
        for prefix, theirs in said.items():
            first = next(iter(said))
            if theirs != said[first] and prefix not in refused:
                refused.add(prefix)
                what = f"was made with another tokenizer than {first}, which has {key} {said[first]}"
                yield Problem(f"{prefix}.json", what, str(theirs), "make all data sets of a run with one tokenizer")


def data_problems(
    experiment: Experiment,
    prefix: str,
    manifest: Mapping[str, Any] | None,
    tokenizer: int | None,
    tokens_there: int | None = None,
) -> Iterator[Problem]:
    """Yields a problem if the vocabulary or the sequence length does not match a data set.

    ``manifest`` is the content of ``<prefix>.json``. Megatron's own tools write none; then the ranks find a mismatch
    only when they read the data. ``tokenizer`` is the number of tokens in ``data.vocab_file``, if the engine reads it;
    otherwise ``tokens_there``, if known, is the number in the .bin.
    """
    tokens, total = (manifest.get(name) if isinstance(manifest, Mapping) else None for name in ("vocab_size", "tokens"))
    given = experiment.model.vocab_size
    if tokens_there is not None and tokens is None and given is None:
        what = f"is left out, and {prefix}.json beside the data does not say it"
        todo = "add it, or make the data with `tridock data preprocess`, which writes it down"
        yield Problem("model.vocab_size", what, "", todo)
    if None not in (tokens_there, total) and tokens_there != total:
        what = f"belongs to other data: the .bin holds {tokens_there} tokens"
        todo = "copy all three files again, or build them again with `tridock data preprocess`"
        yield Problem(f"{prefix}.json", what, f"{total} tokens", todo)
        return
    if tokens is not None and tokenizer is not None and tokens != tokenizer:
        # With a smaller vocabulary the embedding fails on an index; a larger one belongs to another tokenizer.
        todo = "name the files of the tokenizer that made the data"
        yield Problem("data.vocab_file", f"the data was made with {tokens} tokens", f"{tokenizer} tokens", todo)
    if tokens is not None and given is not None and given < tokens:
        what = f"is smaller than the tokenizer of the data, which has {tokens} tokens"
        yield Problem("model.vocab_size", what, str(given), "leave it out, or raise it")
    if tokens_there is None and total is not None and total <= experiment.model.seq_length:
        what, todo = f"is longer than all of {prefix}, {total} tokens", "lower it, or name a larger data set"
        yield Problem("model.seq_length", what, str(experiment.model.seq_length), todo)
