"""Publishes a run to a tracker: points as they arrive, documents at the end, resuming at the tracker's position."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from tridock.contracts import run_folder
from tridock.contracts.records import Lines, read_object
from tridock.contracts.trackers import FOLDER, position_file
from tridock.trackers.points import Point, Samples, unsent, unsent_samples
from tridock.trackers.subject import Subject, say, write_report

_POLL_S: Final = 1.0
_BATCH: Final = 500
_WAITS_S: Final = (2.0, 5.0, 15.0, 60.0)
AFTER_S: Final = 900.0
"""Seconds that a service may be unreachable after the run's end before the rest is left to ``tridock track``."""


class Tracker(Protocol):
    """A tracking service through its own library. Any call may raise; the tracker is then reopened."""

    name: str
    destination: str

    def open(self, subject: Subject) -> Mapping[str, int] | None:
        """Continues the run of this id or creates it; returns the highest iteration that it holds of each series.

        Returns None if the service cannot report it: the position in the run's folder then applies.
        """

    def log(self, points: Sequence[Point]) -> None:
        """Sends points that are newer than the tracker's."""

    def show(self, samples: Samples) -> None:
        """Sends the text samples of an iteration, if newer than the tracker's."""

    def finish(self, subject: Subject, documents: Iterable[Path]) -> None:
        """Sends the documents and the summary, and marks the run as ended."""

    def close(self) -> None:
        """Closes the connection, whatever its state, without an error; nothing of it reaches the next open."""


@dataclass(slots=True)
class Delivered:
    points: int = 0
    reason: str | None = None
    """Why the rest could not be sent."""


def publish(
    subject: Subject,
    tracker: Tracker,
    *,
    follow: bool = True,
    patience_s: float = AFTER_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Delivered:
    """Sends the run's points until it has ended and all is delivered; without ``follow``, only the existing points.

    Retries while the service is unreachable, for at most ``patience_s`` seconds after the run's end.
    """
    delivered, failures, deadline = Delivered(), 0, None
    while True:
        try:
            _session(subject, tracker, delivered, sleep if follow else None)
            delivered.reason = None
            return delivered
        except Exception as error:  # of any library: the run continues without it
            delivered.reason = f"{type(error).__name__}: {str(error).strip()[:500]}"
            say(f"{tracker.name}: {delivered.reason}")
        finally:
            tracker.close()
        failures += 1
        if not follow or subject.state().is_over:
            deadline = deadline or time.monotonic() + patience_s
            if time.monotonic() >= deadline:
                return delivered
        sleep(_WAITS_S[min(failures, len(_WAITS_S)) - 1])


def _session(subject: Subject, tracker: Tracker, delivered: Delivered, sleep: Callable[[float], None] | None) -> None:
    position = position_file(subject.folder, tracker.name)
    published = tracker.open(subject)
    before = read_object(position)
    if published is None:
        published = before["sent"] if before.get("to") == tracker.destination else {}
    sent = dict(published)
    lines, events = Lines(subject.folder / run_folder.METRICS), Lines(subject.folder / run_folder.EVENTS)
    while True:
        # Checked before the file is read: records written before the end are then read after it.
        over = sleep is None or subject.state().is_over
        points = unsent(lines.new_records(), sent)
        while batch := list(islice(points, _BATCH)):
            tracker.log(batch)
            delivered.points += len(batch)
            _note(position, tracker, sent)
        for samples in unsent_samples(events.new_records(), sent):
            tracker.show(samples)
            _note(position, tracker, sent)
        if over:
            break
        assert sleep is not None
        sleep(_POLL_S)
    tracker.finish(subject, _documents(subject, tracker.name))
    _note(position, tracker, sent)


def _note(position: Path, tracker: Tracker, sent: Mapping[str, int]) -> None:
    content = json.dumps({"to": tracker.destination, "sent": dict(sent)}) + "\n"
    run_folder.write_atomic(position, content.encode())


def _documents(subject: Subject, name: str) -> Iterator[Path]:
    """Yields the run's documents and the report page: one page per tracker, as processes write concurrently."""
    yield from subject.documents()
    page = subject.folder / FOLDER / name / run_folder.REPORT
    if not (subject.folder / run_folder.EXPERIMENT).exists():
        return
    page.parent.mkdir(exist_ok=True)
    if (why := write_report(subject.folder, page)) is None:
        yield page
    else:
        say(f"the report page is left out: {why}")
