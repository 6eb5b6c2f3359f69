"""SHA-256 of a stream, computed in a thread."""

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

SUMS: Final = "SHA256SUMS"
"""Hashes of a folder's files, as ``sha256sum`` writes and checks them."""
_BLOCK: Final = 1 << 20
_SMALL: Final = 1 << 16
"""Maximum size of a piece that is hashed without a thread, because starting one takes longer."""
_PENDING_BYTES: Final = 8 << 20
"""Bytes that may wait in memory to be hashed."""


def sha256_of(path: Path) -> str:
    """Returns the hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Digest:
    """Hashes the content of a file, if given, and then pieces in the order in which they are added.

    hashlib releases the GIL. The thread starts with the first large piece and ends with this object.
    """

    def __init__(self, existing: Path | None = None) -> None:
        self._digest = hashlib.sha256()
        if existing is not None:
            with existing.open("rb") as file:
                while data := file.read(_BLOCK):
                    self._digest.update(data)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._held = 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds a piece; blocks while too many are pending."""
        size = memoryview(data).nbytes
        if self._thread is None:
            if size < _SMALL:
                self._digest.update(data)
                return
            self._thread = ThreadPoolExecutor(1, "sha256")
        self._pending.append((size, self._thread.submit(self._digest.update, data)))
        self._held += size
        while self._held > _PENDING_BYTES:
            size, done = self._pending.popleft()
            done.result()
            self._held -= size

    def mark(self) -> Future[str]:
        """Returns a future of the hash of all pieces so far, in hexadecimal digits."""
        if self._thread is not None:
            return self._thread.submit(lambda: self._digest.copy().hexdigest())
        known: Future[str] = Future()
        known.set_result(self._digest.hexdigest())
        return known

    def hexdigest(self) -> str:
        return self.mark().result()
