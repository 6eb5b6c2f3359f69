"""Notifications about a run, sent by apprise: the event, its cause, the remedy, and where to look."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.events import Event
from tridock.contracts.node_answers import Space
from tridock.contracts.records import Record, last_iterations, read_object, records_in
from tridock.contracts.run_folder import write_atomic
from tridock.contracts.run_state import RunState, exit_code_of, state_of
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import NOTIFY, Notification, find_python, position_file
from tridock.trackers.subject import say

_POLL_S: Final = 1.0
_HOUR_S: Final = 3600.0
_TRIAGE_S: Final = 60.0
_TRIES: Final = (0.0, 5.0, 30.0, 120.0)
_OCCASIONS: Final[Mapping[str, str]] = {
    Event.RUN_RESTARTED: "restarted",
    Event.RUN_MOVED: "restarted",
    Event.RANK_HUNG: "stuck",
}
_ENDS: Final[Mapping[RunState, str]] = {
    RunState.DONE: "finished",
    RunState.FAILED: "failed",
    RunState.LOST: "failed",
    RunState.PREEMPTED: "preempted",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message. ``key`` is its identity: each is sent once."""

    key: str
    occasion: str
    title: str
    body: str


def messages(run_id: str, events: Sequence[Record], first: int = 0, here: str = "") -> Iterator[Message]:
    """Yields the messages about the events from line ``first`` on; measures the disk of node ``here`` directly."""
    for number, event in enumerate(events[first:], start=first):
        node = str(event.get("node", ""))
        if event.get("event") == Event.DISK_NEARLY_FULL:
            if node != here:
                disk = Space(event.get("total_bytes", 0), event.get("free_bytes", 0))
                yield disk_message(run_id, f"event-{number}", node, disk)
        elif (occasion := _OCCASIONS.get(event.get("event", ""))) is not None:
            title = f"{run_id}: {occasion}"
            if event["event"] == Event.RUN_RESTARTED:
                title += f" from iteration {event.get('iteration', 0)}, restart {event.get('attempt', '?')}"
            yield Message(f"event-{number}", occasion, title, str(event.get("reason", "")))


def end_message(run_id: str, state: RunState, exit_code: int | None, why: str) -> Message | None:
    """Returns the message about a run's end; None for a run that a user stopped."""
    if (occasion := _ENDS.get(state)) is None:
        return None
    lost = "its supervisor is gone, without an exit code" if state is RunState.LOST else f"exit code {exit_code}"
    return Message(f"end-{state}", occasion, f"{run_id}: {occasion}", why or lost)


def disk_message(run_id: str, key: str, where: str, disk: Space) -> Message:
    body = f"{where}: {disk.free / 2**30:.1f} of {disk.bytes / 2**30:.1f} GiB are free; checkpoints need space"
    return Message(key, "disk", f"{run_id}: the disk is nearly full", f"{body}: free some")


@dataclass(slots=True)
class Recipient:
    """One address: the messages it has received, and those held back by its limit."""

    settings: Notification
    send: Callable[[str, str], bool]
    sent: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Times of its last messages, in seconds since the epoch."""
    held_back: int = 0

    def offer(self, message: Message, now: float) -> bool:
        """Sends a message that it wants and has not received; returns False if the message must be retried.

        Above the hourly limit only the end of a run is sent, with the number of messages held back.
        """
        if message.key in self.sent or message.occasion not in self.settings.events:
            return True
        self.times = [it for it in self.times if now - it < _HOUR_S]
        if len(self.times) >= self.settings.per_hour and not message.key.startswith("end-"):
            self.held_back += 1
            self.sent.append(message.key)
            return True
        more = f"\n{self.held_back} more messages were held back (per_hour)." if self.held_back else ""
        if not self.send(message.title, message.body + more):
            return False
        self.sent.append(message.key)
        self.times.append(now)
        self.held_back = 0
        return True


def notify(folder: Path, supervision: Supervision, clock: Callable[[], float] = time.time) -> int:
    """Sends the messages of a run until it has ended; returns 1 if some could not be sent."""
    position = _Position(position_file(folder, NOTIFY))
    recipients = list(_recipients(supervision.notify, read_object(position.path)))
    handled, failed = 0, False
    while True:
        state = state_of(folder)
        events = [it for it in records_in(folder / run_folder.EVENTS) if it.get("event") != Event.SAMPLES]
        found = [*messages(folder.name, events, handled, supervision.head)]
        usage = shutil.disk_usage(folder)
        if (disk := Space(usage.total, usage.free)).is_nearly_full:
            found.append(disk_message(folder.name, "disk", str(folder), disk))
        if state.is_over:
            why = explained(folder) if state.has_failed else _reached(folder)
            found += filter(None, [end_message(folder.name, state, exit_code_of(folder), why)])
        handled = len(events)
        for message in found:
            failed |= not _deliver(recipients, _with_look(message), clock)
            position.write(recipients)
        position.write(recipients)
        if state.is_over:
            return int(failed)
        time.sleep(_POLL_S)


class _Position:
    """The messages sent to each address, kept in a file; on a full disk, written once there is space."""

    def __init__(self, path: Path) -> None:
        self.path, self._written = path, b""

    def write(self, recipients: Iterable[Recipient]) -> None:
        state = {
            it.settings.variable: {"sent": it.sent, "times": it.times, "held_back": it.held_back} for it in recipients
        }
        if (content := json.dumps(state).encode()) != self._written:
            with suppress(OSError):
                write_atomic(self.path, content)
                self._written = content


def _deliver(recipients: Iterable[Recipient], message: Message, clock: Callable[[], float]) -> bool:
    done = True
    for number, recipient in enumerate(recipients):
        for wait in _TRIES:
            time.sleep(wait)
            if arrived := recipient.offer(message, clock()):
                break
            say(f"notify[{number}]: {message.title}: the service did not take it")
        done &= arrived
    return done


def _recipients(settings: Sequence[Notification], position: Mapping[str, Any]) -> Iterator[Recipient]:
    import apprise

    for number, it in enumerate(settings):
        address = os.environ.get(it.variable, "")
        if not apprise.Apprise().add(address):  # apprise's log would print the address
            say(f"notify[{number}]: is not an address that apprise knows; see docs/notifications.md")
            continue

        def send(title: str, body: str, address: str = address) -> bool:
            service = apprise.Apprise()  # one that failed keeps its login
            service.add(address)
            return bool(service.notify(title=title, body=body))

        yield Recipient(it, send, **position.get(it.variable, {}))


def _with_look(message: Message) -> Message:
    run_id = message.title.partition(":")[0]
    look = f"look: tridock logs --run {run_id}; tridock watch {run_id}"
    return replace(message, body=f"{message.body}\n{look}".strip())


def _reached(folder: Path) -> str:
    if not (last := last_iterations(folder)):
        return ""
    loss = last[-1].get("loss")
    return f"iteration {last[-1]['iteration']}" + (f", loss {loss:.4f}" if isinstance(loss, float) else "")


def explained(folder: Path) -> str:
    """Returns a failed run's cause and remedy as ``tridock triage`` does, or else the last reason in its events."""
    python = find_python("pydantic") or sys.executable
    argv = [python, "-P", "-m", "tridock.cli", "triage", str(folder.absolute())]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TRIAGE_S, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    reasons = [event["reason"] for event in records_in(folder / run_folder.EVENTS) if event.get("reason")]
    return str(reasons[-1]) if reasons else ""
