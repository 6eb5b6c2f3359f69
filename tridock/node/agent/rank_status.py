"""The ranks of this node as they are now: what each says of itself, and what the kernel says of its process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, run_folder
from tridock.node.agent.processes import find_processes
from tridock.node.supervisor.verdict import Vital

_SEARCH_S: Final = 2.0
_ANSWER_S: Final = 1.0
_OOM_COUNTERS: Final = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


class Vitals:
    """Looks again and again; remembers when it first saw a rank dead or stopped, and how it had ended."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.folder, self.ranks = folder, tuple(ranks)
        self._oom_kills = _oom_kills()
        self._watched: dict[int, int] = {}
        self._begin()

    def _begin(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}
        self._gone: dict[int, float] = {}
        self._status: dict[int, int] = {}
        self._stopped: dict[int, float] = {}
        self._searched, self._begun, self._deserted = 0.0, False, False

    def forget(self) -> None:
        """Begins anew, for ranks that will be started again."""
        for rank in self.ranks:
            heartbeat.path_of(self.folder, rank).unlink(missing_ok=True)
        self._begin()

    def look(self) -> list[Vital]:
        """Every rank that has begun. Where all processes of the run have gone, also those that never did."""
        beats = {rank: beat for rank in self.ranks if (beat := heartbeat.read(self.folder, rank)) is not None}
        found = [self._vital(rank, beat) for rank, beat in beats.items()]
        missing = [rank for rank in self.ranks if rank not in beats]
        if missing and self._all_have_gone():
            found += [self._vital(rank, _NEVER) for rank in missing]
        return found

    def deaths(self) -> list[int]:
        """Descriptors that can be read once a rank has died: how is only to be seen until its parent asks for it."""
        return list(self._watched.values())

    def _attend(self, rank: int, beat: heartbeat.Beat) -> None:
        if rank not in self._watched and rank not in self._gone:
            with suppress(OSError):  # it has gone already, or the kernel is older than 5.3: the next look tells as well
                self._watched[rank] = os.pidfd_open(beat.pid)

    def _vital(self, rank: int, beat: heartbeat.Beat) -> Vital:
        now = time.monotonic()
        self._attend(rank, beat)
        state, status = _state(beat)
        if state is None:
            if rank in self._watched:
                os.close(self._watched.pop(rank))
            self._gone.setdefault(rank, now)
            if status is not None:
                self._status[rank] = status
        if state in ("T", "t"):
            self._stopped.setdefault(rank, now)
        else:
            self._stopped.pop(rank, None)
        return Vital(
            rank,
            beat.phase,
            beat.iteration,
            beat.beats,
            beat.code,
            age_s=round(now - beat.at, 2) if beat.at else 0.0,
            alive=state is not None,
            gone_s=round(now - self._gone[rank], 2) if state is None else 0.0,
            status=self._status.get(rank),
            stopped_s=round(now - self._stopped.get(rank, now), 2),
            killed_for_memory=_oom_kills() > self._oom_kills,
        )

    def _all_have_gone(self) -> bool:
        """Whether the run had processes here and has none any more; looked up now and then, for it reads all /proc."""
        now = time.monotonic()
        if now - self._searched >= _SEARCH_S:
            there = bool(find_processes(self.folder.name))
            self._deserted = self._begun and not there
            self._begun = self._begun or there
            self._searched = now
        return self._deserted

    def stacks(self, ranks: Sequence[int]) -> dict[int, list[str]]:
        """Asks ranks for their stacks: the frames of each main thread, the innermost first.

        All of it also goes to the rank's log. A rank that is stopped or was not ready does not answer.
        """
        asked: dict[int, tuple[Path, int]] = {}
        for rank in ranks:
            beat, path = heartbeat.read(self.folder, rank), heartbeat.stacks_path(self.folder, rank)
            if beat is not None and path.exists() and _state(beat)[0] not in (None, "T", "t"):
                asked[rank] = path, path.stat().st_size
                os.kill(beat.pid, heartbeat.STACKS_SIGNAL)
        time.sleep(_ANSWER_S)
        return {rank: frames for rank, (path, size) in asked.items() if (frames := self._read_stacks(rank, path, size))}

    def _read_stacks(self, rank: int, path: Path, size: int) -> list[str]:
        text = path.read_bytes()[size:].decode(errors="replace")
        with (self.folder / run_folder.rank_log(rank)).open("a") as log:
            log.write(f"tridock: rank {rank} does not get on; its threads:\n{text}")
        return main_thread(text)


_NEVER: Final = heartbeat.Beat(0, 0, 0, 0, heartbeat.START, 0, 0.0)


def _state(beat: heartbeat.Beat) -> tuple[str | None, int | None]:
    """The state letter of the rank's process, None where it has gone; and how it ended, while it can still be seen."""
    try:
        fields = Path(f"/proc/{beat.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None, None
    if int(fields[19]) != beat.began:
        return None, None  # another process that was given its number
    # A process that has ended and was not yet asked for by its parent still has its status: proc(5), field 52.
    return (None, int(fields[49])) if fields[0] in "ZX" else (fields[0], None)


def main_thread(text: str) -> list[str]:
    """Of faulthandler's text the frames of the main thread, which it writes last."""
    frames = text.rpartition("(most recent call first):")[2]
    return [f"{file}:{line} in {name}" for file, line, name in re.findall(r'File "(.+?)", line (\d+) in (.+)', frames)]


def _oom_kills() -> int:
    """How often the kernel killed a process of this container for memory; 0 where that is not told."""
    for path in _OOM_COUNTERS:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0
