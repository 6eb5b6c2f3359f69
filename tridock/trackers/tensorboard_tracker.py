"""TensorBoard's event files through its own writer, for programs and logs that write none."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tridock.contracts.trackers import Tracker
from tridock.trackers.points import SAMPLES, Point, Samples, series_of
from tridock.trackers.subject import Subject


class TensorboardTracker:
    """Event files in one folder per run; a restarted process adds a file with the missing points."""

    name = "tensorboard"

    def __init__(self, settings: Tracker) -> None:
        self._settings, self.destination = settings, settings.destination
        self._writer: Any = None

    def open(self, subject: Subject) -> Mapping[str, int] | None:
        own, address = subject.folder / "trackers" / "tensorboard", self._settings.address
        folder = own if address is None or self._settings.offline else Path(address) / subject.run_id
        published: dict[str, int] = {}
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                for value in event.summary.value:
                    series = series_of(value.tag)
                    published[series] = max(published.get(series, -1), event.step)
        self._writer = EventFileWriter(str(folder))
        return published

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            # One record for all values of a point makes it atomic.
            self._writer.add_event(Event(step=point.iteration, summary=Summary(value=values)))
        self._writer.flush()

    def show(self, samples: Samples) -> None:
        # Markdown renders indented text verbatim.
        texts = ["".join(f"    {line}\n" for line in f"{prompt}{text}".splitlines()) for prompt, text in samples.rows]
        values = [value for number, text in enumerate(texts) for value in text_pb(f"{SAMPLES}/{number}", text).value]
        self._writer.add_event(Event(step=samples.iteration, summary=Summary(value=values)))
        self._writer.flush()

    def finish(self, subject: Subject, documents: Iterable[Path]) -> None:
        """Does nothing: TensorBoard shows no documents."""

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):  # its thread may have failed, such as on a full disk
                writer.close()
