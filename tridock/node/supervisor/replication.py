"""Copies the head's files to the nodes that may take over a run whose folder they do not share, in the background.

After every checkpoint: what they lack of it, the run's records, then ``copy.json`` (``tridock.node.agent.replica``).
"""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tridock.contracts import checkpoints, run_folder
from tridock.contracts.codec import decode
from tridock.contracts.events import Event, append_event
from tridock.contracts.lease import RunLease
from tridock.contracts.node_answers import ReplicaStatus
from tridock.contracts.sinks import FOLDER as SINKS
from tridock.contracts.supervision import Supervision
from tridock.errors import ClusterError
from tridock.node.agent.replica import COMPLETE, FILES, Replica
from tridock.node.supervisor.failover import send

_LOOK_S: Final = 2.0
_ASK_S: Final = 60.0
_RECORDS: Final = (
    *(run_folder.EVENTS, run_folder.METRICS, run_folder.LAUNCHER_LOG),
    *(f"{SINKS}/*.json", f"{run_folder.TENSORBOARD}/*", "before-*/*"),
)


class Replication:
    """Keeps the copies on the nodes of ``supervision.replicas``, the first of them the newest."""

    def __init__(self, folder: Path, supervision: Supervision, lease: RunLease) -> None:
        self._folder, self._supervision, self._lease = folder, supervision, lease
        self._copied: dict[str, tuple[int, int]] = {}
        self._failed: set[str] = set()
        # The copies that an earlier supervisor has made.
        self._kept = checkpoints.read_copied(Path(supervision.checkpoints)) if supervision.checkpoints else set[int]()
        self._closed = threading.Event()
        if supervision.replicas:
            threading.Thread(target=self._keep_copying, daemon=True).start()

    def close(self) -> None:
        """Ends it; a copy in progress remains incomplete."""
        self._closed.set()

    def _keep_copying(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for node in self._supervision.replicas:
                self._copy(node)

    def _copy(self, node: str) -> None:
        """Copies if there is something new; records a failure once, and tries again."""
        found = self._newest()
        iteration = 0 if found is None else found[0]
        state = iteration, len(run_folder.read_text(self._folder / run_folder.EVENTS))
        if self._copied.get(node) == state or self._closed.is_set():
            return
        checkpoint = None if found is None else found[1]
        try:
            status = self._ask(node, checkpoint)
            if not status.shares:
                self._keep(iteration)
                replica = self._folder / run_folder.REPLICA
                copy = Replica(self._lease.token, iteration, None if checkpoint is None else checkpoint.name)
                send(self._supervision.reach, node, replica, self._files(checkpoint, status.lacks, copy))
        except (ClusterError, OSError, ValueError, subprocess.SubprocessError) as error:
            if node not in self._failed and not self._closed.is_set():
                append_event(self._folder, Event.COPY_FAILED, node=node, iteration=iteration, reason=str(error))
                print(f"tridock: warning: {node} has no copy of iteration {iteration}: {error}", flush=True)
            self._failed.add(node)
            return
        self._failed.discard(node)
        self._copied[node] = state
        self._lease.note_copy(iteration)

    def _keep(self, iteration: int) -> None:
        """Keeps this checkpoint, which is being copied, and those that the nodes' newest complete copies belong to."""
        if iteration and (folder := self._supervision.checkpoints) is not None:
            complete = {iteration for iteration, _ in self._copied.values()}
            if len(self._copied) < len(self._supervision.replicas):
                complete |= self._kept
            checkpoints.write_copied(Path(folder), {*complete, iteration})

    def _newest(self) -> tuple[int, Path] | None:
        folder = self._supervision.checkpoints
        if folder is None:
            return None
        own = Path(folder).is_relative_to(self._folder)
        return checkpoints.newest(Path(folder), 0.0 if own else self._lease.prepared_at)

    def _ask(self, node: str, checkpoint: Path | None) -> ReplicaStatus:
        name = "" if checkpoint is None else checkpoint.name
        manifest = b"" if checkpoint is None else (checkpoint / checkpoints.MANIFEST).read_bytes()
        options = (f"--token={self._lease.token}", f"--checkpoint={name}")
        command = self._supervision.reach.command(node, "replica-status", *options, str(self._folder))
        done = subprocess.run(command, input=manifest, capture_output=True, timeout=_ASK_S, check=False)
        if done.returncode:
            raise OSError(done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}")
        return decode(ReplicaStatus, done.stdout)

    def _files(
        self, checkpoint: Path | None, lacks: tuple[str, ...], copy: Replica
    ) -> Iterator[tuple[str, bytes | Path]]:
        if checkpoint is not None:
            into = f"{run_folder.CHECKPOINTS}/{checkpoint.name}"
            yield from ((f"{into}/{name}", checkpoint / name) for name in lacks)
            yield f"{into}/{checkpoints.MANIFEST}", checkpoint / checkpoints.MANIFEST
        for pattern in _RECORDS:
            for path in sorted(self._folder.glob(pattern)):
                if path.is_file():
                    # Read at once: a file that grows while it is sent would break the archive.
                    yield f"{FILES}/{path.relative_to(self._folder)}", path.read_bytes()
        yield COMPLETE, copy.to_bytes()
