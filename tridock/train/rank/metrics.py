"""Writes a run's records: ``metrics.jsonl``, ``events.jsonl``, TensorBoard."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tridock.contracts.events import append_line
from tridock.contracts.records import lines_in
from tridock.contracts.run_folder import METRICS, TENSORBOARD, write_atomic


def _iteration_of(line: bytes) -> float:
    """Returns the iteration of a line; infinity for a truncated line."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class Metrics:
    """Writes metrics on rank 0; does nothing on the other ranks."""

    def __init__(self, run_folder: Path, active: bool, tensorboard: bool) -> None:
        self._path = run_folder / METRICS
        self._active = active
        self._board: Any = None
        if active and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_folder / TENSORBOARD))

    def rewind(self, iteration: int) -> None:
        """Removes the records after ``iteration``, which a run that resumes from a checkpoint writes again.

        An evaluation has the iteration that it follows, and is recorded before that iteration's checkpoint.
        """
        if not self._active or not self._path.exists():
            return
        with self._path.open("rb") as file:  # the metrics of a long run do not fit into memory
            if any(_iteration_of(line) > iteration for line in lines_in(file)):
                file.seek(0)
                write_atomic(self._path, (line for line in lines_in(file) if _iteration_of(line) <= iteration))

    def iteration(self, fields: dict[str, Any]) -> None:
        """Writes a logged iteration with the fields of docs/architecture.md."""
        if self._active:
            append_line(self._path, fields)
            self._scalars("train", fields)

    def evaluation(self, iteration: int, split: str, loss: float, losses: Mapping[str, float] | None = None) -> None:
        """Writes an evaluation: ``iteration``, ``split``, ``loss``, and the ``losses`` of data that have names."""
        if self._active:
            named = {} if losses is None else {"losses": losses}
            append_line(self._path, {"iteration": iteration, "split": split, "loss": loss, **named})
            each = {f"losses/{name}": one for name, one in (losses or {}).items()}
            self._scalars(split, {"iteration": iteration, "loss": loss, **each})

    def samples(self, iteration: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Writes samples of text to TensorBoard only; they are also in ``events.jsonl``."""
        if self._board is not None:
            with self._ending_on_error():
                for number, it in enumerate(samples):
                    # Markdown shows indented text as it is.
                    text = "".join(f"    {line}\n" for line in (it["prompt"] + it["text"]).splitlines())
                    self._board.add_text(f"samples/{number}", text, iteration)

    def _scalars(self, group: str, fields: dict[str, Any]) -> None:
        if self._board is not None:
            with self._ending_on_error():
                for name, value in fields.items():
                    if isinstance(value, int | float) and name != "iteration":
                        self._board.add_scalar(f"{group}/{name}", value, fields["iteration"])

    def close(self) -> None:
        if self._board is not None:
            with self._ending_on_error():
                self._board.close()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Stops TensorBoard's writer at its first error: its thread ends then, and every later call raises again."""
        try:
            yield
        except OSError as error:
            self._board = None
            print(f"warning: TensorBoard's file ends here: {error}; metrics.jsonl has all", flush=True)
