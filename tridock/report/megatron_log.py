"""Reads Megatron's logs, of v1.1.5 and of today: losses and times of a run that Tridock did not start.

A log may be truncated, mix the output of several ranks on one line, have gigabytes, or be hostile. It is read as a
stream, and anything but a complete field is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from tridock.contracts.rotated_logs import earlier
from tridock.errors import Problem, RequestError
from tridock.report.columns import Columns

_LONGEST_LINE: Final = 1 << 16
"""Bytes. A longer line is read in pieces."""
_MOST_RUNS, _MOST_PHASES, _MOST_ARGUMENTS, _MOST_RANKS = 16, 64, 4096, 65536

_ITERATION = re.compile(rb"\biteration +(\d{1,12})/ *(\d{1,12}) \|")
_NUMBER = re.compile(rb"[-+]?(?:\d{1,25}(?:\.\d{0,25})?(?:[eE][-+]?\d{1,3})?|nan|inf)")
# A time has two decimals; a truncated one has fewer.
_PHASE = re.compile(rb"\| ([\w-]{1,60}): (\d{1,12}\.\d\d)(?![\d.])")
_TIMERS = re.compile(rb"(?:\(min, max\) |max )?times? across ranks \(ms\):")
_TIMER = re.compile(rb"([A-Za-z][\w-]{0,59}) ?\.*: (?:\(\d{1,12}\.\d\d, (\d{1,12}\.\d\d)\)|(\d{1,12}\.\d\d))\s*$")
_TIMER_NAME = re.compile(rb"^ *(?:\S+: *)?([A-Za-z][\w-]{0,59}):\s*$")
_TIMER_RANK = re.compile(rb"\brank +\d{1,6}: (\d{1,12}\.\d\d)\s*$")
_EVALUATION = re.compile(rb"validation(?: \S{1,40})? loss at ([^|]{1,80}?) *\|(.*)", re.DOTALL)
_EVALUATED = re.compile(rb"lm loss value: *([-+.\deE]{1,32}|nan|inf) \|")
_MEMORY = re.compile(rb"(?:\[Rank (\d{1,6})\] )?[^|\[]{0,80}memory \(MB\) \|(.*)", re.DOTALL)
_LARGEST = re.compile(rb"max (reserved|allocated): (\d{1,9}(?:\.\d{1,20})?)(?= \||\s*$)")
_WORLD = re.compile(rb"using world size: (\d{1,9})\b")
_ARGUMENT = re.compile(rb"^(?:\[?\w{1,20}\]?: ?)? {1,4}(\w{1,60}) \.{2,} (.{0,300})$")

_COLUMNS: Final = {
    b"consumed samples": ("consumed_samples", 1.0),
    b"elapsed time per iteration (ms)": ("step_time_s", 1e-3),
    b"elapsed time per iteration (s)": ("step_time_s", 1.0),
    b"throughput per GPU (TFLOP/s/GPU)": ("tflops", 1.0),
    b"learning rate": ("lr", 1.0),
    b"global batch size": ("global_batch_size", 1.0),
    b"lm loss": ("loss", 1.0),
    b"loss scale": ("loss_scale", 1.0),
    b"grad norm": ("grad_norm", 1.0),
    b"number of skipped iterations": ("skipped", 1.0),
    b"number of nan iterations": ("nan", 1.0),
}
"""Names of Megatron's fields to our column and unit."""


@dataclass(slots=True)
class MegatronLog:
    """One run in a log. Times are in seconds, memory in bytes."""

    columns: Columns = field(default_factory=Columns)
    phases: Columns = field(default_factory=Columns)
    """Seconds per iteration, a column per timer of Megatron; of the slowest rank if the log has it."""
    evaluations: dict[str, Columns] = field(default_factory=dict)
    """By split, with the column ``loss``."""
    memory: dict[int, float] = field(default_factory=dict)
    """Peak reserved (or else allocated) memory by rank."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Arguments as Megatron prints them at its start."""
    train_iters: int | None = None
    world_size: int | None = None


def read_log(path: Path) -> list[MegatronLog]:
    """Returns the runs in a log, mostly one.

    An iteration lower than the last one begins another run, unless a checkpoint was loaded before it.
    Raises :class:`RequestError` if the file cannot be read or has no iteration.
    """
    with RequestError.in_place_of(OSError, f"--log {path}", "cannot be read", "give the output of a Megatron run"):
        reader = _read(path)
    if not len(reader.log.columns):
        todo = "give the output of the rank that logs (v1.1.5: the first, today: the last)"
        what, got = "has no iteration as Megatron logs it", f"{reader.lines:,} lines"
        raise RequestError(Problem(f"--log {path}", what, got, todo))
    return reader.logs


def read_phases(path: Path) -> Columns:
    """Returns only the phases of a log; empty if it has none or does not exist."""
    try:
        return _read(*filter(Path.exists, (earlier(path), path))).log.phases
    except OSError:
        return Columns()


def _read(*paths: Path) -> _Reader:
    reader = _Reader()
    for line in chain.from_iterable(map(_lines, paths)):
        reader.feed(line)
    reader.end()
    return reader


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            yield line


class _Reader:
    """Keeps the state of the log: times follow the iteration that they belong to."""

    def __init__(self) -> None:
        self.log = MegatronLog()
        self.logs = [self.log]
        self.lines = 0
        self._loaded = self._timers = False
        self._timer: bytes | None = None
        self._times: dict[str, float] = {}
        self._kinds: tuple[tuple[bytes, Callable[[bytes], None]], ...] = (
            (b"| elapsed time per", self._iterations),
            (b"time (ms) |", self._phases),
            (b"loss at ", self._evaluation),
            (b"across ranks (ms)", self._begin_timers),
            (b"memory (MB) |", self._memory),
            (b" ...", self._argument),
            (b"using world size", self._world),
            (b"successfully loaded ", self._load),
        )

    def feed(self, line: bytes) -> None:
        self.lines += 1
        for sign, action in self._kinds:
            if sign in line:
                action(line)
        if self._timers:
            self._timer_line(line)

    def end(self) -> None:
        """Completes the iteration that was read last."""
        if self._times and self.log.columns.last is not None:
            self.log.phases.add(self.log.columns.last, self._times)
        self._times = {}

    def _iterations(self, line: bytes) -> None:
        self._timers = False
        found = list(_ITERATION.finditer(line))
        if not found:
            return  # truncated: an iteration without its number
        ends = [match.start() for match in found[1:]] + [len(line)]
        for match, end in zip(found, ends, strict=True):
            values = dict(_fields(line[match.end() : end]))
            if values:
                iteration = int(match[1])
                self.end()
                self._go_back(iteration)
                self.log.columns.add(iteration, values)
                self.log.train_iters = int(match[2])

    def _go_back(self, iteration: int) -> None:
        """Before a lower iteration: the run resumed from a checkpoint, or another run begins."""
        last = self.log.columns.last
        if last is not None and iteration < last:
            if self._loaded or len(self.logs) >= _MOST_RUNS:
                for columns in (*self.log.evaluations.values(), self.log.phases):
                    columns.cut(iteration)
            else:
                self.log = MegatronLog(arguments=self.log.arguments, world_size=self.log.world_size)
                self.logs.append(self.log)
        self._loaded = False

    def _load(self, _line: bytes) -> None:
        self._loaded = True

    def _phases(self, line: bytes) -> None:
        for name, time in _PHASE.findall(line[line.index(b"time (ms) |") :]):
            self._phase(name, time)

    def _begin_timers(self, line: bytes) -> None:
        if _TIMERS.search(line):
            self._timers, self._timer = True, None

    def _timer_line(self, line: bytes) -> None:
        if found := _TIMER_RANK.search(line):
            if self._timer is not None:
                self._phase(self._timer, found[1])
        elif found := _TIMER.search(line):
            self._phase(found[1], found[2] or found[3])
        elif found := _TIMER_NAME.match(line):
            self._timer = found[1]

    def _phase(self, name: bytes, milliseconds: bytes) -> None:
        text, times = name.decode(), self._times
        if text in times or len(times) < _MOST_PHASES:
            times[text] = max(times.get(text, 0.0), float(milliseconds) / 1000)

    def _evaluation(self, line: bytes) -> None:
        if not (found := _EVALUATION.search(line)) or not (loss := _EVALUATED.search(found[2])):
            return
        where = found[1]
        numbers = re.search(rb"iteration +(\d{1,12})", where)
        iteration = int(numbers[1]) if numbers else self.log.columns.last
        if iteration is not None:
            split = "test" if b"test" in where else "valid"
            self.log.evaluations.setdefault(split, Columns()).add(iteration, {"loss": float(loss[1])})

    def _memory(self, line: bytes) -> None:
        if not (found := _MEMORY.search(line)):
            return
        rank = int(found[1] or 0)
        sizes = dict(_LARGEST.findall(found[2]))
        size = sizes.get(b"reserved") or sizes.get(b"allocated")
        if size and (rank in self.log.memory or len(self.log.memory) < _MOST_RANKS):
            self.log.memory[rank] = max(self.log.memory.get(rank, 0.0), float(size) * 2**20)

    def _argument(self, line: bytes) -> None:
        arguments = self.log.arguments
        if (found := _ARGUMENT.match(line.rstrip())) and len(arguments) < _MOST_ARGUMENTS:
            arguments[found[1].decode(errors="replace")] = found[2].decode(errors="replace").strip()

    def _world(self, line: bytes) -> None:
        if found := _WORLD.search(line):
            self.log.world_size = int(found[1])


def _fields(text: bytes) -> Iterator[tuple[str, float]]:
    """Yields complete fields. Megatron ends each with a bar: one without is truncated, perhaps within a number."""
    for piece in text.split(b"|")[:-1]:
        name, _, value = piece.rpartition(b":")
        value = value.strip()
        if (known := _COLUMNS.get(name.strip())) and _NUMBER.fullmatch(value):
            yield known[0], float(value) * known[1]
