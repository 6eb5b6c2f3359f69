"""The data sets that a run reads: section ``data`` of an experiment, with Megatron's blends. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from tridock.strict_yaml import PathText, Section, path_text

BLOCK: Final = 10_000
"""Samples in which every data set of a weighted blend has its share; then their order repeats."""

Blend = str | tuple[float | str, ...]
_FORM: Final = "must be a prefix, a list of prefixes, or a list of pairs: a weight above 0 and a prefix"


class DataSet(NamedTuple):
    """One data set of a blend; without weights each sample of each one comes once an epoch."""

    prefix: str
    weight: float | None = None


def _number(word: object) -> float | None:
    """Returns a weight as in Megatron's arguments, a number or its text; None for anything else."""
    if isinstance(word, bool) or not isinstance(word, int | float | str):
        return None
    try:
        return float(word)
    except ValueError:
        return None


def _read(value: Any) -> Any:
    words = value.split() if isinstance(value, str) else value
    if isinstance(value, str) and (len(words) < 2 or None in map(_number, words[::2])):
        return path_text(value)
    if not isinstance(words, list | tuple):
        raise ValueError(_FORM)
    weighted = any(_number(word) is not None for word in words[::2])
    prefixes = list(words[1::2] if weighted else words)
    weights = [_number(word) for word in words[::2]] if weighted else []
    if not prefixes or not all(isinstance(it, str) for it in prefixes) or (weighted and len(words) % 2):
        raise ValueError(_FORM)
    shares = [it for it in weights if it is not None and 0 < it < math.inf]
    if len(shares) < len(weights):
        raise ValueError(_FORM)
    for prefix in prefixes:
        path_text(prefix)
        if prefixes.count(prefix) > 1:
            raise ValueError(f"names {prefix} twice: name it once, with the sum of its weights")
    for share, prefix in zip(shares, prefixes, strict=False):
        if share / sum(shares) * BLOCK < 1:
            raise ValueError(f"gives {prefix} less than one sample in {BLOCK:,}: leave it out, or raise its weight")
    return tuple(word for pair in zip(shares, prefixes, strict=True) for word in pair) if weighted else tuple(prefixes)


DataPath = Annotated[Blend, BeforeValidator(_read)]
"""A prefix; prefixes; or weights, each before its prefix. As Megatron's ``--data-path``, also in one string."""


def _read_named(value: Any) -> Any:
    if not isinstance(value, dict):
        return _read(value)
    for name in value:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("must name each data set with lower-case letters, digits, - and _")
    if not value:
        raise ValueError("must name a data set")
    return {name: _read(it) for name, it in value.items()}


_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")
NamedDataPaths = Annotated[Blend | dict[str, Blend], BeforeValidator(_read_named)]
"""A :data:`DataPath`, or several, each with a name."""


def data_sets(value: Blend | None) -> tuple[DataSet, ...]:
    """Returns the data sets of a :data:`DataPath`, none for None."""
    if value is None or isinstance(value, str):
        return () if value is None else (DataSet(value),)
    if isinstance(value[0], str):
        return tuple(DataSet(str(it)) for it in value)
    return tuple(DataSet(str(it), float(weight)) for weight, it in zip(value[::2], value[1::2], strict=True))


def with_prefixes(value: Any, places: Mapping[str, str]) -> Any:
    """Returns :data:`NamedDataPaths`, or nothing, with other prefixes."""
    if isinstance(value, Mapping):
        return {name: with_prefixes(it, places) for name, it in value.items()}
    if value is None or isinstance(value, str):
        return value and places[value]
    return tuple(places[it] if isinstance(it, str) else it for it in value)


def _trains(split: str) -> str:
    train, *others = map(float, split.split(","))
    if not train or not math.isfinite(train + sum(others)):
        raise ValueError("must be finite shares, that of training above 0")
    return split


PART_PATHS: Final = ("train_data_path", "valid_data_path", "test_data_path")
"""The fields that name the data of training, validation and test each."""


class Data(Section):
    """Input data: Megatron's indexed data sets; NumPy arrays for images."""

    data_path: DataPath | None = Field(
        default=None,
        description="Prefix of <prefix>.bin and <prefix>.idx, relative to /workspace in the container; for images"
        " <prefix>_images.npy (uint8, N x 3 x height x width) and <prefix>_labels.npy (int64, N). Several are blended:"
        " [0.7, data/a, 0.3, data/b] by weights, [data/a, data/b] by their sizes. Required without train_data_path.",
    )
    train_data_path: DataPath | None = Field(
        default=None, description="Like data_path, for training alone and undivided; in place of data_path and split."
    )
    valid_data_path: NamedDataPaths | None = Field(
        default=None,
        description="With train_data_path: the data of validation, undivided; {web: data/a, code: data/b} for a loss of"
        " each.",
    )
    test_data_path: DataPath | None = Field(
        default=None, description="With train_data_path: the data of the test, undivided."
    )
    split: Annotated[
        str, StringConstraints(pattern=r"^\d+(\.\d+)?,\d+(\.\d+)?,\d+(\.\d+)?$"), AfterValidator(_trains)
    ] = Field(
        default="949,50,1",
        description="Proportions of documents (or images) for training, validation and test; the first is above 0, and"
        " with train.eval_interval the second too.",
    )
    vocab_file: PathText | None = Field(
        default=None,
        description="GPT-2 vocabulary (vocab.json); only read by engine megatron-deepspeed, which needs it.",
    )
    merge_file: PathText | None = Field(
        default=None, description="GPT-2 merges (merges.txt); only read by engine megatron-deepspeed, which needs it."
    )

    @model_validator(mode="after")
    def _one_way_to_name_them(self) -> Self:
        own = [name for name in PART_PATHS if getattr(self, name) is not None]
        if (self.data_path is None) == (self.train_data_path is None) or (self.data_path is not None and own):
            raise ValueError("needs data_path; or train_data_path, with valid_data_path and test_data_path")
        if own and "split" in self.model_fields_set and self.split != Data.model_fields["split"].default:
            raise ValueError("has train_data_path, which is not divided: leave split out")
        return self

    def sets(self, part: int) -> tuple[DataSet, ...]:
        """Returns the data sets of training (0), validation (1) or test (2)."""
        return tuple(it for sets in self.named_sets(part).values() for it in sets)

    def named_sets(self, part: int) -> Mapping[str, tuple[DataSet, ...]]:
        """Returns the same by the names of those that are evaluated by themselves; "" without names."""
        own = (self.train_data_path, self.valid_data_path, self.test_data_path)
        found = self.data_path if self.is_divided else own[part]
        named = found if isinstance(found, dict) else {"": found}
        return {name: data_sets(it) for name, it in named.items()}

    def moved(self, places: Mapping[str, str]) -> Self:
        """Returns the same data with other prefixes."""
        paths = {name: getattr(self, name) for name in ("data_path", *PART_PATHS)}
        return self.model_copy(update={name: with_prefixes(value, places) for name, value in paths.items()})

    @property
    def is_divided(self) -> bool:
        """Whether training, validation and test are parts of the same data sets."""
        return self.data_path is not None

    @property
    def shares(self) -> str:
        """How each data set is divided; training's share of one that is not is all of it."""
        return self.split if self.is_divided else "1,0,0"

    @property
    def prefixes(self) -> tuple[str, ...]:
        """All data sets, those of training first."""
        return tuple(dict.fromkeys(it.prefix for part in range(3) for it in self.sets(part)))

    @property
    def fields(self) -> dict[str, str]:
        """The field that names each data set first, by prefix."""
        named = (
            (name if not self.is_divided else "data_path", self.sets(part)) for part, name in enumerate(PART_PATHS)
        )
        found = [(it.prefix, name) for name, sets in named for it in sets]
        return dict(reversed(found))

    @property
    def prefix(self) -> str:
        """The first data set. The tokenizer of all is beside it."""
        return self.prefixes[0]
