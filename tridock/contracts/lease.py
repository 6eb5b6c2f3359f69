"""Leases: the holder of the newest lease in a run's folder supervises the run. All nodes see a shared folder's leases.

In ``.lease-N``, N is the fencing token. The supervisor that holds a lease touches its file every ``RENEW_S`` seconds.
A node that has seen the file untouched for ``EXPIRY_S``, by its own clock, marks the lease as taken. It then creates
the next lease with ``link``, which succeeds on one node only, also on NFS. A supervisor checks for the mark before it
acts, so one that was suspended notices that it has lost the run.
"""

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from tridock.contracts import run_folder
from tridock.contracts.codec import decode, encode

RENEW_S: Final = 2.0
EXPIRY_S: Final = 10.0
_NAME: Final = ".lease-"


class LeaseLostError(Exception):
    """Another node has taken the run."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The content of a lease file."""

    node: str
    """The node whose supervisor holds it."""
    prepared_at: float
    """As in :class:`tridock.contracts.supervision.Supervision`; each lease copies it from the previous one."""
    taken_by: str | None = None


def newest(folder: Path) -> int:
    """Returns the token of the run's newest lease, or 0 if this node sees no lease."""
    names = (path.name.removeprefix(_NAME) for path in folder.glob(f"{_NAME}*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def read(folder: Path, token: int) -> Lease | None:
    """Returns the lease, or None if it cannot be read."""
    try:
        return decode(Lease, _path(folder, token).read_bytes())
    except (OSError, ValueError):
        return None


class HeldLease:
    """The lease that this process holds."""

    def __init__(self, folder: Path, token: int, lease: Lease) -> None:
        self.token, self.prepared_at = token, lease.prepared_at
        self._folder, self._node = folder, lease.node
        self._renewed = time.monotonic()

    @classmethod
    def first(cls, folder: Path, node: str, prepared_at: float) -> Self:
        """Creates the lease of a run that is being started or restarted."""
        while True:
            lease = cls._next(folder, newest(folder), node, prepared_at)
            if lease is not None:
                return lease

    @classmethod
    def take(cls, folder: Path, token: int, node: str) -> Self | None:
        """Takes the lease after ``token``, which has expired. Returns None if another node was faster."""
        return cls._next(folder, token, node, time.time())

    @classmethod
    def _next(cls, folder: Path, token: int, node: str, prepared_at: float) -> Self | None:
        if token:
            before = read(folder, token) or Lease("", prepared_at)
            prepared_at = min(prepared_at, before.prepared_at)
            # The mark comes first, so that the current holder ends before anybody takes the next lease.
            run_folder.write_atomic(_path(folder, token), _encoded(replace(before, taken_by=node)))
        lease = Lease(node, prepared_at)
        partial = folder / f"{_NAME}{secrets.token_hex(8)}.part"  # pids can be equal on several nodes
        run_folder.write_atomic(partial, _encoded(lease))
        try:
            os.link(partial, _path(folder, token + 1))
        except FileExistsError:
            return None
        finally:
            partial.unlink(missing_ok=True)
        return cls(folder, token + 1, lease)

    def check(self) -> None:
        """Raises :class:`LeaseLostError` if another node has taken the run."""
        found = read(self._folder, self.token)
        if found is not None and found.taken_by is not None:
            raise LeaseLostError(
                f"the supervisor on {self._node} was suspended, and {found.taken_by} took over the run"
            )

    def renew(self) -> None:
        """Touches the lease every ``RENEW_S`` seconds. Raises like :meth:`check`."""
        now = time.monotonic()
        if now - self._renewed >= RENEW_S:
            self.check()
            self._renewed = now
            with suppress(OSError):  # a disk that is read-only; a folder that somebody removed
                os.utime(_path(self._folder, self.token))


class LeaseWatch:
    """Watches a run's newest lease from another node, and measures for how long it has been untouched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._stamp()
        self._since = self._looked = time.monotonic()
        self.renewed = False
        """Whether the supervisor that holds the lease has touched it."""

    @property
    def token(self) -> int:
        return self._seen[0]

    def look(self) -> float:
        """Returns the seconds for which the lease has been untouched."""
        now, seen = time.monotonic(), self._stamp()
        if seen[0] == self._seen[0] and seen != self._seen:
            lease = read(self._folder, seen[0])
            self.renewed = lease is None or lease.taken_by is None
        if seen != self._seen or now - self._looked > EXPIRY_S / 2:  # this node itself may have been suspended
            self._since = now
        self._seen, self._looked = seen, now
        return now - self._since

    def _stamp(self) -> tuple[int, int]:
        """Opens the file, not only stats it, because NFS then asks its server."""
        token = newest(self._folder)
        try:
            with _path(self._folder, token).open("rb") as file:
                return token, os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return token, 0


def _path(folder: Path, token: int) -> Path:
    return folder / f"{_NAME}{token}"


def _encoded(lease: Lease) -> bytes:
    return f"{encode(lease)}\n".encode()
