"""Metrics in the output of your own program: patterns that extract them from a line. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

Figures = dict[str, float]

_NUMBER: Final = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))"
_EPOCH: Final = re.compile(r"\bEpoch (\d+)\b.*?\b(\d+)/(\d+)\b")
_OF_LIGHTNING: Final = re.compile(rf"\b([\w/]+)(?:=|: ){_NUMBER}")
_OF_TRAINER: Final = re.compile(rf"'(\w+)': '?{_NUMBER}")
_OF_MEGATRON: Final = re.compile(rf"\b([a-zA-Z][\w ()]*?): *{_NUMBER} \|")
_ITERATION: Final = re.compile(r"\biteration +(\d+)/ *\d+ \|")
_PAIR: Final = re.compile(rf"([A-Za-z][\w/]*) ?[=:] ?{_NUMBER}")

_COLUMNS: Final = {
    "iteration": ("iteration", "iter", "step", "global_step"),
    "loss": ("loss", "train_loss", "train/loss", "train_loss_step", "lm loss"),
    "valid_loss": ("eval_loss", "val_loss", "valid_loss", "val/loss"),
    "lr": ("lr", "learning_rate", "learning rate"),
    "grad_norm": ("grad_norm", "grad norm"),
    "step_time_s": ("step_time_s", "step_time"),
    "tokens_per_second": ("tokens_per_second",),
}
_COLUMN_OF: Final = {name: column for column, names in _COLUMNS.items() for name in names}


def _lightning(line: str) -> Figures:
    if (bar := _EPOCH.search(line)) is None:
        return {}
    epoch, step, steps = map(int, bar.groups())
    return {**_known(_OF_LIGHTNING.findall(line)), "iteration": epoch * steps + step}


def _megatron(line: str) -> Figures:
    if (found := _ITERATION.search(line)) is None:
        return {}
    return {**_known(_OF_MEGATRON.findall(line)), "iteration": int(found[1])}


PRESETS: Final[dict[str, Callable[[str], Figures]]] = {
    "hf-trainer": lambda line: {} if "'train_runtime'" in line else _known(_OF_TRAINER.findall(line)),
    "lightning": _lightning,
    "megatron": _megatron,
    "key=value": lambda line: _known(_PAIR.findall(line)),
}


def reader_of(pattern: str) -> Callable[[str], Figures]:
    """Returns a function that extracts a line's metrics. ``pattern`` is the name of a format, or a regular expression
    with named groups.

    Raises :class:`ValueError` for an expression that cannot give a loss.
    """
    if pattern in PRESETS:
        return PRESETS[pattern]
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if not expression.groupindex.keys() & {*_COLUMNS["loss"], *_COLUMNS["valid_loss"]}:
        raise ValueError(f"must be one of {', '.join(PRESETS)}, or a regular expression with a group (?P<loss>…)")

    def read(line: str) -> Figures:
        found = expression.search(line)
        return {} if found is None else _known((name, text) for name, text in found.groupdict().items() if text)

    return read


def _known(pairs: Iterable[tuple[str, str]]) -> Figures:
    """Keeps the first value of each metric."""
    found: Figures = {}
    for name, text in pairs:
        column = _COLUMN_OF.get(name)
        if column is not None and column not in found:
            try:
                found[column] = float(text)
            except ValueError:
                continue
    return found


class OutputMetrics:
    """Converts output lines to records of ``metrics.jsonl``. Several ranks may print the same iteration.

    ``others`` are the nodes besides the first, which a launcher writes before their lines. If lines have no iteration,
    those of the first node are counted: transformers' Trainer prints on every node.
    """

    def __init__(self, pattern: str, others: Iterable[str] = ()) -> None:
        self._read = reader_of(pattern)
        self._others = tuple(f"{node}: " for node in others)
        self._last = -1
        self._evaluated = -1

    def records(self, line: str) -> Iterator[dict[str, object]]:
        """Yields the records that a line adds."""
        figures = self._read(line)
        if "iteration" not in figures and line.startswith(self._others):
            return
        iteration = int(figures.pop("iteration", max(self._last, 0) + ("loss" in figures)))
        valid = figures.pop("valid_loss", None)
        if "loss" in figures and iteration > self._last:
            self._last = iteration
            yield {"iteration": iteration, **figures}
        if valid is not None and iteration > self._evaluated:
            self._evaluated = iteration
            yield {"iteration": iteration, "split": "valid", "loss": valid}
