"""SHA-256 of what goes by, reckoned by a thread beside the work."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 20
_PENDING_BYTES: Final = 8 << 20
"""As much may wait: what is to be hashed stays in memory until it is."""


class Digest:
    """The hash of the pieces in the order given, after what a file holds already.

    hashlib lets other threads run while it reckons. The thread starts with the first piece and ends with this object.
    """

    def __init__(self, begun: Path | None = None) -> None:
        self._digest = hashlib.sha256()
        if begun is not None:
            with begun.open("rb") as file:
                while data := file.read(_BLOCK):
                    self._digest.update(data)
        self._thread = ThreadPoolExecutor(1, "sha256")
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._held = 0

    def update(self, data: bytes | memoryview) -> None:
        """Appends a piece; waits where too many do."""
        size = memoryview(data).nbytes
        self._pending.append((size, self._thread.submit(self._digest.update, data)))
        self._held += size
        while self._held > _PENDING_BYTES:
            size, done = self._pending.popleft()
            done.result()
            self._held -= size

    def mark(self) -> Future[str]:
        """The hash of all pieces up to here, in hexadecimal digits."""
        return self._thread.submit(lambda: self._digest.copy().hexdigest())

    def hexdigest(self) -> str:
        """The hash so far."""
        return self.mark().result()
