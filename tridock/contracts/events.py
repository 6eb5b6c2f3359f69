"""``events.jsonl``: a run's events, the cause codes of its failures, and the functions that write and read them."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.appends import append
from tridock.contracts.records import Lines, records_in

_MOST_BYTES: Final = 16 << 20
_SAMPLES: Final = b'"event": "samples"'


class Event(StrEnum):
    """Every event. A line is an object with ``time``, ``event`` and the fields listed here; ``?``: optional."""

    # Written by the ranks.
    RUN_STARTED = "run_started"  # run
    WORLD_FORMED = "world_formed"  # world_size, backend
    MODEL_BUILT = "model_built"  # parameters, padded_vocab_size
    EVALUATION = "evaluation"  # iteration, split, loss, seconds
    SAMPLES = "samples"  # iteration, samples (prompt and text of each), seconds
    CHECKPOINT_SAVED = "checkpoint_saved"  # iteration, folder, seconds, pause_seconds (for which training paused), ill?
    CHECKPOINT_CONDEMNED = "checkpoint_condemned"  # iteration, ill (what showed afterwards that it is of no use)
    CHECKPOINT_COPIED = "checkpoint_copied"  # iteration, seconds; every file of it is on two nodes
    CHECKPOINT_WAITED = "checkpoint_waited"  # iteration, previous (the one that was being written), seconds
    CHECKPOINT_FAILED = "checkpoint_failed"  # iteration, reason, copy? (true: only its second copy)
    CHECKPOINT_LOADED = "checkpoint_loaded"  # folder, iteration
    CHECKPOINT_REJECTED = "checkpoint_rejected"  # folder, reasons
    CHECKPOINTS_SET_ASIDE = "checkpoints_set_aside"  # iteration (from which the run continues), folders (new names)
    COMMUNICATION_MEASURED = "communication_measured"  # iterations, exposed, in_flight, exposed_by_rank
    BESIDE_BARE = "beside_bare"  # steps, engine_s, bare_s
    RUN_FINISHED = "run_finished"  # iteration, device, peak_memory_bytes, peak_memory_by_rank
    RUN_PREEMPTED = "run_preempted"  # iteration
    RUN_FAILED = "run_failed"  # rank, cause, reason, problem? (where, what, got, todo), agreed?, consequence?
    # Written by the supervisor.
    RANK_DIED = "rank_died"  # rank, node, exit_code, cause, reason, wait_status?
    RANK_HUNG = "rank_hung"  # rank, node, exit_code, cause, reason, path? (the file that it waits for)
    NODE_LOST = "node_lost"  # node, exit_code, cause, reason
    LAUNCHER_ENDED = "launcher_ended"  # exit_code, cause, reason
    NODE_FAILED = "node_failed"  # node, cause, reason: its program, its setup, its devices, the head's login
    MEMORY_KILLS = "memory_kills"  # node, processes: killed by the kernel for memory in an attempt that failed
    LINK_FAULTS = "link_faults"  # node, link, downs: of a network interface or port in such an attempt
    CLOCK_DIFFERS = "clock_differs"  # node, seconds (ahead of the head's clock; negative: behind) at its end
    DISK_NEARLY_FULL = "disk_nearly_full"  # node, free_bytes, total_bytes
    RUN_RESTARTED = "run_restarted"  # attempt, iteration, reason, log_bytes (of launcher.log until then)
    NOT_RESTARTED = "not_restarted"  # reason
    TAKEN_OVER = "taken_over"  # node (that supervises from now on), previous, token, reason
    RUN_MOVED = "run_moved"  # lost, nodes, layout, world_size, reason
    # Written in a Slurm job.
    JOB_STARTED = "job_started"  # job, nodes, again
    JOB_REQUEUED = "job_requeued"  # iteration, reason
    JOB_NOT_REQUEUED = "job_not_requeued"  # reason
    # A node lost contact with the supervisor; a user stopped the run.
    HEAD_LOST = "head_lost"  # node, cause, reason
    RUN_STOPPED = "run_stopped"


FAULTS = (
    *(Event.RUN_FAILED, Event.RANK_DIED, Event.RANK_HUNG, Event.NODE_LOST, Event.LAUNCHER_ENDED, Event.HEAD_LOST),
    *(Event.CHECKPOINT_FAILED, Event.CHECKPOINT_REJECTED, Event.RUN_RESTARTED, Event.RUN_MOVED, Event.NOT_RESTARTED),
    *(Event.TAKEN_OVER, Event.MEMORY_KILLS, Event.LINK_FAULTS, Event.CLOCK_DIFFERS, Event.CHECKPOINT_CONDEMNED),
)
"""Events that a page marks as faults."""


class Cause(StrEnum):
    """Why a run failed, as a code for programs; ``reason`` is the text for people."""

    # A rank's own failure.
    EXCEPTION = "exception"  # not raised by Tridock: `reason` holds the message of Python, torch or the system
    REFUSED = "refused"  # raised by Tridock, without a specific code: `problem` holds it
    LOSS_NOT_FINITE = "loss_not_finite"
    NOTHING_TRAINED = "nothing_trained"
    TOKEN_OUTSIDE_VOCABULARY = "token_outside_vocabulary"  # noqa: S105 (no password)
    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    CHECKPOINT_FOREIGN_OBJECT = "checkpoint_foreign_object"
    INDEX_MAPS_NOT_WRITABLE = "index_maps_not_writable"
    RENDEZVOUS_FAILED = "rendezvous_failed"
    NCCL_FAILED = "nccl_failed"
    TERMINATED = "terminated"
    INTERRUPTED = "interrupted"
    # A rank that failed because of another.
    PEER_LOST = "peer_lost"
    # Seen by the supervisor.
    RANK_FAILED = "rank_failed"  # the rank has recorded its own RUN_FAILED
    RANK_KILLED_FOR_MEMORY = "rank_killed_for_memory"
    RANK_SIGNALLED = "rank_signalled"
    RANK_EXITED = "rank_exited"
    RANK_VANISHED = "rank_vanished"
    RANK_GONE = "rank_gone"  # the first to end under a launcher that reports an error; only the launcher saw how
    RANK_STOPPED = "rank_stopped"
    RANK_HUNG = "rank_hung"
    COLLECTIVE_HUNG = "collective_hung"
    PROGRAM_SILENT = "program_silent"  # your own program without heartbeats: no output and no processor time
    BUILD_LOCKED = "build_locked"  # it waits for the lock of torch's extension builder that nothing holds
    NODE_SILENT = "node_silent"
    SSH_SESSION_LOST = "ssh_session_lost"
    LAUNCHER_EXITED = "launcher_exited"
    HEAD_SILENT = "head_silent"
    # A run of your own program, and a node of it.
    SEPARATE_WORLDS = "separate_worlds"  # it trains on each node, or in each slot, without the others
    SETUP_FAILED = "setup_failed"
    PROGRAM_NOT_STARTED = "program_not_started"
    PROGRAM_FAILED = "program_failed"
    # The head's way to a node.
    LOGIN_REFUSED = "login_refused"
    # A node that gives the run no devices.
    DEVICES_TAKEN = "devices_taken"

    @property
    def event(self) -> Event:
        """The event that records this cause."""
        return _EVENTS.get(self, Event.RUN_FAILED)


_EVENTS = {
    **dict.fromkeys(
        (Cause.RANK_KILLED_FOR_MEMORY, Cause.RANK_SIGNALLED, Cause.RANK_EXITED, Cause.RANK_VANISHED, Cause.RANK_GONE),
        Event.RANK_DIED,
    ),
    **dict.fromkeys(
        (Cause.RANK_STOPPED, Cause.RANK_HUNG, Cause.COLLECTIVE_HUNG, Cause.PROGRAM_SILENT, Cause.BUILD_LOCKED),
        Event.RANK_HUNG,
    ),
    **dict.fromkeys((Cause.NODE_SILENT, Cause.SSH_SESSION_LOST), Event.NODE_LOST),
    **dict.fromkeys(
        (
            *(Cause.SETUP_FAILED, Cause.PROGRAM_NOT_STARTED, Cause.PROGRAM_FAILED, Cause.SEPARATE_WORLDS),
            *(Cause.LOGIN_REFUSED, Cause.DEVICES_TAKEN),
        ),
        Event.NODE_FAILED,
    ),
    Cause.LAUNCHER_EXITED: Event.LAUNCHER_ENDED,
    Cause.HEAD_SILENT: Event.HEAD_LOST,
}


def append_line(path: Path, fields: Mapping[str, object]) -> None:
    """Appends one JSON object as one line, see :mod:`tridock.contracts.appends`.

    JSON has no infinity and no NaN: they become null.
    """
    append(path, (json.dumps(_plain(fields), allow_nan=False) + "\n").encode())


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(it) for name, it in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_event(folder: Path, event: Event, /, **fields: object) -> None:
    """Appends a line to ``events.jsonl``: ``time`` (UTC, ISO 8601), ``event`` and the event's fields."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    append_line(folder / run_folder.EVENTS, {"time": now, "event": event, **fields})


def events_of(folder: Path, event: Event, first: int = 0) -> list[dict[str, Any]]:
    """Returns the run's events with this name, skipping the ``first`` lines of the file."""
    entries = islice(records_in(folder / run_folder.EVENTS), first, None)
    return [entry for entry in entries if entry.get("event") == event]


def event_count(folder: Path) -> int:
    """Returns the number of the run's events so far."""
    return sum(1 for _ in records_in(folder / run_folder.EVENTS))


def event_lines(folder: Path) -> str:
    """Returns the lines of ``events.jsonl`` that may say why a run failed: no samples of text, and at most the last
    16 MiB of the others.
    """
    kept, size = deque[bytes](), 0
    for line in Lines(folder / run_folder.EVENTS).new():
        if line.startswith(b"{") and _SAMPLES not in line:
            kept.append(line)
            size += len(line)
            while size > _MOST_BYTES:
                size -= len(kept.popleft())
    return b"".join(kept).decode(errors="replace")


def samples_of(events: Iterable[Mapping[str, Any]]) -> dict[int, list[tuple[str, str]]]:
    """Returns prompts and texts by iteration. If a restarted run repeats an iteration, the last one counts."""
    found = {}
    for event in events:
        iteration, samples = event.get("iteration"), event.get("samples")
        if event.get("event") == Event.SAMPLES and isinstance(iteration, int) and isinstance(samples, list):
            pairs = ((it.get("prompt"), it.get("text")) for it in samples if isinstance(it, dict))
            found[iteration] = [(str(prompt), str(text)) for prompt, text in pairs]
    return found
