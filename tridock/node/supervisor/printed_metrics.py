"""Writes ``metrics.jsonl`` for your own program, from its output."""

from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.events import append_line
from tridock.contracts.output_metrics import OutputMetrics


class PrintedMetrics:
    """Reads the launcher's log as it grows, and records the pattern's matches; without a pattern, nothing."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._metrics = OutputMetrics(pattern) if pattern else None
        self._offset = 0
        self._rest = b""

    def begin(self, offset: int) -> None:
        """Starts another attempt, which may repeat iterations, at this byte of the log."""
        if self._pattern:
            self._metrics, self._offset, self._rest = OutputMetrics(self._pattern), offset, b""

    def read(self) -> None:
        """Records the matches in the new lines."""
        if self._metrics is None:
            return
        with (self._folder / run_folder.LAUNCHER_LOG).open("rb") as log:
            log.seek(self._offset)
            new = log.read()
        self._offset += len(new)
        # A progress bar restarts its line with a carriage return.
        *lines, self._rest = (self._rest + new).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            for record in self._metrics.records(line.decode(errors="replace")):
                append_line(self._folder / run_folder.METRICS, record)
