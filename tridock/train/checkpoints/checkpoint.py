"""Checkpoints: written beside, listed with their hashes, renamed when whole, and pointed to by ``latest`` last.

``checkpoints/iter_0000100/`` holds what the engine writes and ``files.json``, which names every file with its size and
SHA-256; ``checkpoints/latest`` the newest folder's name, as DeepSpeed's own tools expect it, or
``latest_checkpointed_iteration.txt`` its number, as Megatron's do. No folder counts without the one, and no checkpoint
without the other: whatever ends a run at whatever moment, the one before is still there, and named.

Nodes may or may not share the folder. Ranks find out by looking for each other's files; the lowest rank on each file
system, its leader, makes and renames folders there and writes what is common to all ranks. So a checkpoint is whole on
one shared folder, and on nodes that share nothing each holds what its own ranks need to go on.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from tridock.contracts.checkpoints import MANIFEST
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError, RunError
from tridock.train.checkpoints import files
from tridock.train.checkpoints.files import Entry, Names
from tridock.train.checkpoints.write_errors import write_failure
from tridock.train.rank.process_group import Agreed, Ranks, barrier, together


class Checkpoints:
    """The checkpoints in one folder. Creating it is a collective, and so are its methods."""

    def __init__(self, folder: Path, ranks: Ranks, names: Names) -> None:
        self.folder, self.names, self.ranks = folder, names, ranks
        self.leader = _leader(folder, ranks)
        self.leads = self.leader == ranks.rank
        leaders: list[int] = [0] * ranks.world_size
        dist.all_gather_object(leaders, self.leader)
        self._sharing = [rank for rank, leader in enumerate(leaders) if leader == self.leader]
        if self.leads:
            self._put_back()
        barrier()

    def require_shared(self) -> None:
        """Refuses a folder that is not one for all ranks."""
        with together(self.ranks):
            check_shared(self.folder, self.leader)

    # ---- saving ----

    def save(
        self,
        write: Callable[[Path, bool], None],
        iteration: int,
        own: Mapping[str, bytes],
        needed: Collection[str] = (),
        keep: int | None = None,
    ) -> Path:
        """Writes a checkpoint, points at it, and removes those that ``keep`` lets go; gives its folder.

        ``write`` gets the folder and whether this rank also writes what is common to all ranks; the files ``own`` are
        added, and those that the rank will need must be among all. Raises :class:`Agreed` on every rank where any of
        them cannot write: nothing of it is left then, and what was there before is as it was.
        """
        name = self.names.folder(iteration)
        final, staging = self.folder / name, self.folder / f".{name}.part"
        partial = staging / name
        try:
            with self._writing(final):
                if self.leads:
                    self._clear()
                    partial.mkdir(parents=True)
            with self._writing(final):
                write(partial, self.leads)
                if self.leads:
                    for file, content in own.items():
                        write_atomic(partial / file, content)
            entries = self._entries(final, partial, needed)
            with self._writing(final):
                if self.leads:
                    self._finish(staging, iteration, entries)
            with self._writing(final):
                if self.leads:
                    self._point(iteration)
        except Agreed:
            barrier()  # no rank is writing any more
            if self.leads:
                shutil.rmtree(staging, ignore_errors=True)
                self._put_back()
            raise
        except BaseException:
            # Half a checkpoint is of no use, and may be what fills the disk.
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if self.leads:
            self._prune(keep, iteration)
        barrier()
        return final

    @contextmanager
    def _writing(self, final: Path) -> Iterator[None]:
        """What any rank cannot write, all of them learn of."""
        with together(self.ranks):
            try:
                yield
            except Exception as error:
                if (got := write_failure(error)) is None:
                    raise
                todo = (
                    "free space there or mend its permissions; continue from the last whole checkpoint with train.load"
                )
                raise RunError(Problem(str(final), "the checkpoint could not be written", got, todo)) from error

    def _entries(self, final: Path, partial: Path, needed: Collection[str]) -> dict[str, Entry]:
        """The manifest's content, each file read and brought to the disk by one rank that sees it."""
        mine: dict[str, Entry] = {}
        with self._writing(final):
            sizes = files.sizes_in(partial)
            if missing := [name for name in needed if name not in sizes]:
                todo = "look for another rank's message in logs/rank-<N>.log"
                raise RunError(Problem(str(final), "the checkpoint lacks a file", missing[0], todo))
            for name in files.dealt(sizes, self._sharing)[self.ranks.rank]:
                mine[name] = Entry.of(partial / name, sync=True)
        shares: list[tuple[int, dict[str, Entry]]] = [(0, {})] * self.ranks.world_size
        dist.all_gather_object(shares, (self.leader, mine))
        return {name: entry for leader, share in shares if leader == self.leader for name, entry in share.items()}

    def _finish(self, staging: Path, iteration: int, entries: Mapping[str, Entry]) -> None:
        """The manifest, and the name that makes it count. One of that name is put aside until then."""
        name = self.names.folder(iteration)
        partial, final, old = staging / name, self.folder / name, self.folder / f".{name}.old"
        write_atomic(partial / MANIFEST, files.manifest_bytes(iteration, entries))
        files.sync_folders(partial)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        for tool in staging.iterdir():  # DeepSpeed's zero_to_fp32.py
            tool.replace(self.folder / tool.name)
        staging.rmdir()
        files.sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _point(self, iteration: int) -> None:
        for pointer, form in self.names.pointers:
            write_atomic(self.folder / pointer, form.format(iteration).encode())
        files.sync_folder(self.folder)

    def _clear(self) -> None:
        """Removes what a save that was cut short has left."""
        for left in self.folder.glob(".*.part"):
            shutil.rmtree(left)

    def _put_back(self) -> None:
        """What was put aside for a checkpoint of the same name that never came."""
        for old in self.folder.glob(".*.old"):
            final = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(final)

    def _prune(self, keep: int | None, iteration: int) -> None:
        if keep is None:
            return
        whole = {
            found: files.looks_whole(self.folder / self.names.folder(found)) for found in self.names.found(self.folder)
        }
        for old in files.to_remove(whole, keep, iteration):
            name = self.names.folder(old)
            # Under another name first: what is half removed must not look like a checkpoint.
            doomed = self.folder / f".{name}.part"
            with suppress(OSError):  # what cannot be removed stays, and once the disk is full, that is told
                (self.folder / name).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def check_shared(folder: Path, leader: int) -> None:
    """Whether this rank sees what rank 0 writes, by the leader that it found there."""
    if leader != 0:
        what = "checkpoints of this engine lie in one folder that all nodes share"
        got = f"a folder of rank {leader}'s node alone: {folder}"
        raise RequestError(Problem("train.save", what, got, "mount a shared file system there, or set it to false"))


def _leader(folder: Path, ranks: Ranks) -> int:
    """The lowest rank that sees the same files in ``folder`` as this one."""
    folder.mkdir(parents=True, exist_ok=True)
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0)
    local_ranks: list[int] = [0] * ranks.world_size
    dist.all_gather_object(local_ranks, ranks.local_rank)
    candidates = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == min(local_ranks)]
    mine = folder / f".{token[0]}-{ranks.rank}"
    if ranks.rank in candidates:
        mine.touch()
    barrier()
    # Asked for by name: a listing could come out of a network file system's cache.
    leader = next((rank for rank in candidates if (folder / f".{token[0]}-{rank}").exists()), ranks.rank)
    barrier()
    mine.unlink(missing_ok=True)
    return leader
