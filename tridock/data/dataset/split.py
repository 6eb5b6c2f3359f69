"""``tridock data split``: a data set's documents, in their order, into train, valid and test, or into equal parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tridock.data.dataset.indexed_dataset import idx_path
from tridock.data.dataset.prefixes import open_whole
from tridock.data.dataset.slices import Output, Progress, Stretch, Written, write_outputs
from tridock.errors import Problem, RequestError

SPLITS: Final = ("train", "valid", "test")
_SHARES: Final = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}")

Named = tuple[str, int, int]
"""A part's name, its first document and its last (exclusive)."""


def share_bounds(documents: int, shares: Sequence[float]) -> tuple[int, int, int, int]:
    """First documents of train, valid and test, and the end, rounded as megatron-core does.

    ``shares``: three, of any sum above zero.
    """
    total = sum(shares)
    ends = [round(documents * sum(shares[: count + 1]) / total) for count in range(3)]
    return 0, ends[0], ends[1], ends[2]


def by_shares(text: str, documents: int) -> list[Named]:
    """``"969,30,1"``: train, valid and test, those of share 0 left out, as the engines would take them from the whole.

    Raises :class:`RequestError` for anything else, and where a share is left without a document.
    """
    if not _SHARES.fullmatch(text) or not any(map(float, text.split(","))):
        todo = "give one to three shares of train, valid and test: 969,30,1"
        raise RequestError(Problem("--split", "is not a list of shares", text, todo))
    shares = ([float(share) for share in text.split(",")] + [0.0, 0.0])[:3]
    bounds = share_bounds(documents, shares)
    parts = [(name, bounds[number], bounds[number + 1]) for number, name in enumerate(SPLITS) if shares[number]]
    problems = [
        Problem(
            "--split", f"leaves {name} without a document", f"{text} of {documents} documents", "give it a larger share"
        )
        for name, first, last in parts
        if first == last
    ]
    if problems:
        raise RequestError(problems)
    return parts


def by_number(parts: int, documents: int) -> list[Named]:
    """So many parts, whose numbers of documents differ by one at most; in the order of their names."""
    if not 1 <= parts <= documents:
        what = f"must be from 1 to the number of documents, {documents}"
        raise RequestError(Problem("--parts", what, str(parts), "give fewer" if parts > 1 else "give at least 1"))
    width = len(str(parts - 1))
    return [
        (f"{number:0{width}d}", documents * number // parts, documents * (number + 1) // parts)
        for number in range(parts)
    ]


def split(
    prefix: Path, shares: str | None, parts: int | None, output: Path | None = None, progress: Progress | None = None
) -> list[Written]:
    """Writes ``<output>_<name>`` for each part (``output`` None: beside the data set); exactly one of ``shares`` and
    ``parts`` is given.

    Raises :class:`RequestError` where that cannot be, before anything is written.
    """
    (dataset,), (manifest,) = open_whole([prefix])
    base = output or prefix
    named = by_number(parts, dataset.documents) if parts is not None else by_shares(shares or "", dataset.documents)
    _check_leftovers(base, {name for name, _, _ in named}, parts is not None)
    outputs = []
    for name, first, last in named:
        told = f"documents {first} to {last - 1} of the {dataset.documents} of {prefix.name}"
        # Which lines were rejected between these documents is not known.
        own = None if manifest is None else manifest.model_copy(update={"part": told, "rejected": 0})
        place = base.with_name(f"{base.name}_{name}")
        outputs.append(Output(place, (Stretch(dataset, first, last),), own))
    if any(made.prefix.resolve() == prefix.resolve() for made in outputs):
        todo = "choose another --output-prefix"
        raise RequestError(Problem(str(prefix), "is one of the parts that would be written", "", todo))
    return write_outputs(outputs, progress)


def _check_leftovers(base: Path, made: set[str], numbered: bool) -> None:
    """What an earlier split left besides these parts holds documents that are now in one of them, and count twice."""
    there = [file.stem.removeprefix(f"{base.name}_") for file in base.parent.glob("*.idx")]
    problems = [
        Problem(
            str(base.with_name(f"{base.name}_{name}")),
            "lies there from another split, and this one makes none",
            "",
            "remove it, or choose another --output-prefix",
        )
        for name in sorted(there)
        if idx_path(base.with_name(f"{base.name}_{name}")).exists()
        and name not in made
        and (name.isdecimal() if numbered else name in SPLITS)
    ]
    if problems:
        raise RequestError(problems)
