"""Writes checkpoints: stages them in a hidden folder, hashes all files, renames the folder, then updates ``latest``.

``checkpoints/iter_0000100/`` holds the engine's files and ``files.json``, which lists each with its size and SHA-256.
``checkpoints/latest`` holds the newest folder's name, as DeepSpeed's tools expect, or
``latest_checkpointed_iteration.txt`` its number, as Megatron's do. A folder is valid only with its ``files.json``, and
the pointer changes only afterwards: whenever a run ends, the pointer names a complete checkpoint.

Nodes may or may not share the folder; ranks find out by looking for each other's files. The lowest rank on each file
system, its leader, creates and renames folders there and writes the files that are common to all ranks. A shared folder
thus has the complete checkpoint; otherwise each node has the files that its own ranks need to resume.
"""

import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from tridock.contracts.checkpoints import MANIFEST, read_copied, set_aside
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError, RunError
from tridock.train.checkpoints import files
from tridock.train.checkpoints.files import Entry, Names
from tridock.train.checkpoints.snapshot import Write
from tridock.train.checkpoints.write_errors import write_failure
from tridock.train.rank.process_group import AgreedError, Ranks, agree_on_errors, barrier

Prepare = Callable[[Path, bool, dist.ProcessGroup | None], Write]
"""Its arguments are the folder, whether this rank also writes the files common to all ranks, and the process group of a
background write or None; see ``Strategy.save``."""


class Checkpoints:
    """The checkpoints in one folder. The constructor and all public methods are collectives."""

    def __init__(self, folder: Path, ranks: Ranks, names: Names, in_background: bool = False) -> None:
        self.folder, self.names, self.ranks = folder, names, ranks
        self._background = ranks.in_background() if in_background else ranks
        self.leader = _leader(folder, ranks)
        self.leads = self.leader == ranks.rank
        leaders: list[int] = [0] * ranks.world_size
        dist.all_gather_object(leaders, self.leader)
        self._sharing = [rank for rank, leader in enumerate(leaders) if leader == self.leader]
        if self.leads:
            self._restore()
        barrier()

    def require_shared(self) -> None:
        """Raises :class:`AgreedError` if the ranks do not share the folder."""
        with agree_on_errors(self.ranks):
            check_shared(self.folder, self.leader)

    def set_aside_after(self, iteration: int, loaded: Path | None) -> list[str]:
        """Renames the checkpoints that the run would overwrite, and points at the one that it continues from.

        These are all of later iterations, and one of the same iteration that is not ``loaded``. Returns their new names
        on this rank's node. Raises :class:`AgreedError` if any node cannot rename one.
        """
        here, renamed = self.folder / self.names.folder(iteration), []
        continues = loaded is not None and loaded.resolve() == here.resolve()
        with self._writing(self.folder, self.ranks):
            if self.leads:
                left = [n for n in self.names.found(self.folder) if n > iteration or (n == iteration and not continues)]
                renamed = [set_aside(self.folder / self.names.folder(number)).name for number in sorted(left)]
                if continues:
                    self._point(iteration)
                elif renamed:
                    for pointer, _ in self.names.pointers:
                        (self.folder / pointer).unlink(missing_ok=True)
        return renamed

    # ---- saving ----

    def start(
        self,
        prepare: Prepare,
        iteration: int,
        own: Mapping[str, bytes],
        needed: Collection[str] = (),
        keep: int | None = None,
        in_background: bool = False,
    ) -> Callable[[], Path]:
        """Begins a checkpoint; returns the function that writes it, which ``in_background`` another thread may call.

        That function writes the files, updates the pointer, removes all but the newest ``keep`` checkpoints, and
        returns the folder. ``own`` are further files by name; ``needed`` are the names that this rank needs to load.
        Both functions raise :class:`AgreedError` on every rank if any rank cannot write; they then remove the new
        checkpoint and leave the previous ones unchanged.
        """
        final, staging = self.folder / self.names.folder(iteration), self._staging(iteration)
        partial = staging / final.name
        with self._removing(staging, self.ranks):
            with self._writing(final, self.ranks):
                if self.leads:
                    self._clear()
                    partial.mkdir(parents=True)
            with self._writing(final, self.ranks):
                write = prepare(partial, self.leads, self._background.group if in_background else None)
        ranks = self._background if in_background else self.ranks
        return lambda: self._write(ranks, write, iteration, own, needed, keep)

    def _staging(self, iteration: int) -> Path:
        return self.folder / f".{self.names.folder(iteration)}.part"

    def _write(
        self,
        ranks: Ranks,
        write: Write,
        iteration: int,
        own: Mapping[str, bytes],
        needed: Collection[str],
        keep: int | None,
    ) -> Path:
        final, staging = self.folder / self.names.folder(iteration), self._staging(iteration)
        partial = staging / final.name
        with self._removing(staging, ranks):
            with self._writing(final, ranks):
                write()
                if self.leads:
                    for file, content in own.items():
                        write_atomic(partial / file, content)
            entries, copied = self._entries(final, partial, needed, ranks)
            with self._writing(final, ranks):
                if self.leads:
                    self._finish(staging, iteration, entries)
            with self._writing(final, ranks):
                if self.leads:
                    self._point(iteration)
        if self.leads:
            self._prune(keep, iteration, copied)
        barrier(ranks.group)
        return final

    @contextmanager
    def _removing(self, staging: Path, ranks: Ranks) -> Iterator[None]:
        """Removes an unfinished checkpoint if an error ends the block, because it may fill the disk."""
        try:
            yield
        except AgreedError:
            barrier(ranks.group)  # all ranks have stopped writing
            if self.leads:
                shutil.rmtree(staging, ignore_errors=True)
                self._restore()
            raise
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    @contextmanager
    def _writing(self, final: Path, ranks: Ranks) -> Iterator[None]:
        """Turns a write error on any rank into an :class:`AgreedError` on all."""
        with agree_on_errors(ranks):
            try:
                yield
            except Exception as error:
                if (got := write_failure(error)) is None:
                    raise
                todo = "free space there or fix its permissions; resume the last complete one with train.load"
                raise RunError(Problem(str(final), "the checkpoint could not be written", got, todo)) from error

    def _entries(
        self, final: Path, partial: Path, needed: Collection[str], ranks: Ranks
    ) -> tuple[dict[str, Entry], set[int]]:
        """Returns the manifest's content, and the iterations that another node has copied, by the head's folder.

        One rank that sees a file reads it and syncs it to disk.
        """
        mine: dict[str, Entry] = {}
        with self._writing(final, ranks):
            sizes = files.sizes_in(partial)
            if missing := [name for name in needed if name not in sizes]:
                todo = "look for another rank's message in logs/rank-<N>.log"
                raise RunError(Problem(str(final), "the checkpoint lacks a file", missing[0], todo))
            for name in files.assign_to_ranks(sizes, self._sharing)[self.ranks.rank]:
                mine[name] = Entry.of(partial / name, sync=True)
        shares: list[tuple[int, dict[str, Entry], set[int]]] = [(0, {}, set())] * self.ranks.world_size
        copied = read_copied(self.folder) if self.leads else set()
        dist.all_gather_object(shares, (self.leader, mine, copied), group=ranks.group)
        entries = {name: entry for leader, share, _ in shares if leader == self.leader for name, entry in share.items()}
        return entries, set().union(*(copied for *_, copied in shares))

    def _finish(self, staging: Path, iteration: int, entries: Mapping[str, Entry]) -> None:
        """Writes the manifest and renames the folder; keeps a previous folder of that name until then."""
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
        for remains in self.folder.glob(".*.part"):
            shutil.rmtree(remains)

    def _restore(self) -> None:
        """Restores a checkpoint that was set aside for another of the same name, if that was never finished."""
        for old in self.folder.glob(".*.old"):
            final = self.folder / old.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(final)

    def _prune(self, keep: int | None, iteration: int, copied: set[int]) -> None:
        if keep is None:
            return
        complete = {
            found: files.is_complete(self.folder / self.names.folder(found)) for found in self.names.found(self.folder)
        }
        for old in (number for number in files.to_remove(complete, keep, iteration) if number not in copied):
            name = self.names.folder(old)
            # Renamed first: a half-removed folder must not look like a checkpoint.
            doomed = self.folder / f".{name}.part"
            with suppress(OSError):  # a folder that cannot be removed stays; a full disk is reported by the next save
                (self.folder / name).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def check_shared(folder: Path, leader: int) -> None:
    """Raises :class:`RequestError` if this rank does not see rank 0's files and thus has another leader."""
    if leader != 0:
        what = "checkpoints of this engine lie in one folder that all nodes share"
        got = f"a folder of rank {leader}'s node alone: {folder}"
        raise RequestError(Problem("train.save", what, got, "mount a shared file system there, or set it to false"))


def _leader(folder: Path, ranks: Ranks) -> int:
    """Returns the lowest rank that sees the same files in ``folder`` as this one."""
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
    # Looked up by name: a directory listing could come from a network file system's cache.
    leader = next((rank for rank in candidates if (folder / f".{token[0]}-{rank}").exists()), ranks.rank)
    barrier()
    mine.unlink(missing_ok=True)
    return leader
