"""``tridock data split``: divides a data set, in order, into train, valid and test, or into equal parts."""

import re
from pathlib import Path
from typing import Final

from tridock.contracts.data_index import SPLITS, share_bounds
from tridock.data.dataset.indexed_dataset import idx_path
from tridock.data.dataset.prefixes import open_datasets
from tridock.data.dataset.slices import Output, Progress, Slice, Written, write_outputs
from tridock.errors import Problem, RequestError

_SHARES: Final = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}")

Named = tuple[str, int, int]
"""Name of a part, its first and its last (exclusive) document."""


def by_shares(text: str, documents: int) -> list[Named]:
    """Returns the parts for ``"969,30,1"``: train, valid and test as the engines split; none for a share of 0.

    Raises :class:`RequestError` for an invalid text, and if a share has no document.
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
    RequestError.raise_for(problems)
    return parts


def by_number(parts: int, documents: int) -> list[Named]:
    """Returns ``parts`` parts whose numbers of documents differ by at most one."""
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
    """Writes ``<output>_<name>`` for each part; ``output`` defaults to ``prefix``. Give either ``shares`` or ``parts``.

    Raises :class:`RequestError` if it is impossible, before anything is written.
    """
    (dataset,), (manifest,) = open_datasets([prefix])
    base = output or prefix
    named = by_number(parts, dataset.documents) if parts is not None else by_shares(shares or "", dataset.documents)
    _check_leftovers(base, {name for name, _, _ in named}, parts is not None)
    outputs = []
    for name, first, last in named:
        part = f"documents {first} to {last - 1} of the {dataset.documents} of {prefix.name}"
        # The rejected lines between these documents are unknown.
        own = None if manifest is None else manifest.model_copy(update={"part": part, "rejected": 0})
        place = base.with_name(f"{base.name}_{name}")
        outputs.append(Output(place, (Slice(dataset, first, last),), own))
    if any(output.prefix.resolve() == prefix.resolve() for output in outputs):
        todo = "choose another --output-prefix"
        raise RequestError(Problem(str(prefix), "would be overwritten by one of the parts", "", todo))
    return write_outputs(outputs, progress)


def _check_leftovers(base: Path, names: set[str], numbered: bool) -> None:
    """Refuses to write beside other parts of an earlier split: they would contain the same documents."""
    there = [file.stem.removeprefix(f"{base.name}_") for file in base.parent.glob("*.idx")]
    problems = [
        Problem(
            str(base.with_name(f"{base.name}_{name}")),
            "exists from another split, but is not part of this one",
            "",
            "remove it, or choose another --output-prefix",
        )
        for name in sorted(there)
        if idx_path(base.with_name(f"{base.name}_{name}")).exists()
        and name not in names
        and (name.isdecimal() if numbered else name in SPLITS)
    ]
    RequestError.raise_for(problems)
