"""Writes checkpoints: stages them in a hidden folder, hashes all files, renames the folder, then updates ``latest``.

``checkpoints/iter_0000100/`` holds the engine's files and ``files.json``, which lists each with its size and SHA-256.
``checkpoints/latest`` holds the newest folder's name, as DeepSpeed's tools expect, or
``latest_checkpointed_iteration.txt`` its number, as Megatron's do. A folder is valid only with its ``files.json``, and
the pointer changes only afterwards: whenever a run ends, the pointer names a complete checkpoint.

Nodes may or may not share the folder; ranks find out by looking for each other's files. The lowest rank on each file
system, its leader, creates and renames folders there and writes the files that are common to all ranks. A shared folder
thus has the complete checkpoint; otherwise each node has the files that its own ranks need to resume, and a list of
those that other nodes have.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from tridock.contracts.checkpoint_files import Entry, Illness, Manifest, is_complete, read_manifest
from tridock.contracts.checkpoints import MANIFEST, OLD, PART, hidden, left_hidden, set_aside
from tridock.contracts.partials import is_folder, partial_of, remove_left_files
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RunError
from tridock.train.checkpoints import files
from tridock.train.checkpoints.exchange import exchange, transfers
from tridock.train.checkpoints.files import Names
from tridock.train.checkpoints.snapshot import Write
from tridock.train.checkpoints.write_errors import write_failure
from tridock.train.rank.process_group import AgreedError, Ranks, agree_on_errors, barrier

Prepare = Callable[[Path, Sequence[int], dist.ProcessGroup | None], Write]
"""Its arguments are the folder, the rank that leads each rank's file system and also writes there the files common to
all ranks, and the process group of a background write or None; see ``Strategy.save``."""
_PROBE: Final = "ranks"
"""Names the files by which ranks find out whether they share the folder."""
_IN_THE_WAY: Final = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY)


class Checkpoints:
    """The checkpoints in one folder. The constructor and all public methods are collectives."""

    def __init__(self, folder: Path, ranks: Ranks, names: Names, own_group: bool = False) -> None:
        """``own_group``: checkpoints are written in the background, or copied, which takes a Gloo group."""
        self.folder, self.names, self.ranks = folder, names, ranks
        self._background = ranks.in_background() if own_group else ranks
        self.leader = _leader(folder, ranks)
        self.leads = self.leader == ranks.rank
        self._leaders: list[int] = [0] * ranks.world_size
        dist.all_gather_object(self._leaders, self.leader)
        self._sharing = [rank for rank, leader in enumerate(self._leaders) if leader == self.leader]
        with self._writing(folder, ranks):
            if self.leads:
                self._restore()

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
        ill: Illness | None = None,
        in_background: bool = False,
    ) -> Callable[[], Path]:
        """Begins a checkpoint; returns the function that writes it, which ``in_background`` another thread may call.

        That function writes the files, updates the pointer, removes all but the newest ``keep`` checkpoints, and
        returns the folder. ``own`` are further files by name; ``needed`` are the names that this rank needs to load.
        One saved in ``ill`` health says so, and replaces no other.
        Both functions raise :class:`AgreedError` on every rank if any rank cannot write; they then remove the new
        checkpoint, unless only the pointer could not be written, and leave the previous ones unchanged.
        """
        final = self.folder / self.names.folder(iteration)
        staging = hidden(final, PART)
        partial = staging / final.name
        with self._removing(staging, self.ranks):
            with self._writing(final, self.ranks):
                if self.leads:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self._clear()
                    staging.mkdir()
                    partial.mkdir()
            with self._writing(final, self.ranks):
                write = prepare(partial, self._leaders, self._background.group if in_background else None)
        ranks = self._background if in_background else self.ranks
        return lambda: self._write(ranks, write, iteration, own, needed, keep, ill)

    def _write(
        self,
        ranks: Ranks,
        write: Write,
        iteration: int,
        own: Mapping[str, bytes],
        needed: Collection[str],
        keep: int | None,
        ill: Illness | None,
    ) -> Path:
        final = self.folder / self.names.folder(iteration)
        staging = hidden(final, PART)
        partial = staging / final.name
        with self._removing(staging, ranks):
            with self._writing(final, ranks):
                write()
                if self.leads:
                    for file, content in own.items():
                        write_atomic(partial / file, content)
            manifest = replace(self._manifest(final, partial, needed, ranks), ill=ill)
            with self._writing(final, ranks):
                if self.leads:
                    self._finish(partial, final, manifest.to_bytes())
            with self._writing(final, ranks):
                if self.leads:
                    self._point(iteration)
        if self.leads:
            self._prune(keep, iteration)
        barrier(ranks.group)
        return final

    def condemn(self, iteration: int, ill: Illness) -> bool:
        """Adds to a complete checkpoint that its weights have turned out to be of no use. A collective.

        Returns whether it is there.
        """
        folder = self.folder / self.names.folder(iteration)
        manifest = read_manifest(folder)
        with self._writing(folder, self.ranks):
            if self.leads and isinstance(manifest, Manifest):
                write_atomic(folder / MANIFEST, replace(manifest, ill=ill).to_bytes())
        return isinstance(manifest, Manifest)

    def copy(self, final: Path) -> bool:
        """Sends each file system's part of a complete checkpoint to the next one. A collective in the background.

        Returns whether there is more than one. Raises :class:`AgreedError` if a part could not be written; the
        checkpoint itself stays complete.
        """
        if len(set(self._leaders)) == 1:
            return False
        ranks, group = self._background, self._background.group
        manifest = read_manifest(final) if self.leads else None
        with agree_on_errors(ranks):
            if isinstance(manifest, Problem):
                raise RunError(manifest)
        here = {} if manifest is None else manifest.here
        found: list[tuple[int, Mapping[str, Entry]]] = [(0, {})] * ranks.world_size
        dist.all_gather_object(found, (self.leader, here), group=group)
        have = {leader: dict(entries) for rank, (leader, entries) in enumerate(found) if rank == leader}
        leaders = sorted(have)
        following = dict(zip(leaders, [*leaders[1:], leaders[0]], strict=True))
        wanted = {following[leader]: set(have[leader]) - set(have[following[leader]]) for leader in leaders}
        moved = transfers(have, wanted)
        with self._writing(final, ranks):
            if self.leads:
                assert group is not None
                exchange(final, moved, ranks, group)
                got = {it.name: it.entry for it in moved if ranks.rank in it.targets}
                assert isinstance(manifest, Manifest)
                write_atomic(final / MANIFEST, manifest.with_more(got).to_bytes())
        barrier(group)
        return True

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
                where, what = final, "the checkpoint could not be written"
                todo = "free space there or fix its permissions"
                if isinstance(error, OSError) and error.errno in _IN_THE_WAY:
                    place = Path(error.filename2 or error.filename or "")
                    if place.parent == self.folder:
                        where, what, todo = place, f"is in the way of {final.name}", "move it away or remove it"
                todo += "; resume the last complete one with train.load"
                raise RunError(Problem(str(where), what, got, todo)) from error

    def _manifest(self, final: Path, partial: Path, needed: Collection[str], ranks: Ranks) -> Manifest:
        """Returns the manifest on this rank's file system; one rank that sees a file reads it and syncs it to disk."""
        mine: dict[str, Entry] = {}
        with self._writing(final, ranks):
            sizes = files.sizes_in(partial)
            if missing := [name for name in needed if name not in sizes]:
                todo = "look for another rank's message in logs/rank-<N>.log"
                raise RunError(Problem(str(final), "the checkpoint lacks a file", missing[0], todo))
            for name in files.assign_to_ranks(sizes, self._sharing)[self.ranks.rank]:
                mine[name] = Entry.of(partial / name, sync=True)
        shares: list[tuple[int, dict[str, Entry]]] = [(0, {})] * self.ranks.world_size
        dist.all_gather_object(shares, (self.leader, mine), group=ranks.group)
        here: dict[str, Entry] = {}
        elsewhere: dict[str, Entry] = {}
        for leader, share in shares:
            (here if leader == self.leader else elsewhere).update(share)
        return Manifest(here, {name: entry for name, entry in elsewhere.items() if name not in here})

    def _finish(self, partial: Path, final: Path, manifest: bytes) -> None:
        """Writes the manifest and renames the folder; keeps a previous folder of that name until then."""
        staging, old = partial.parent, hidden(final, OLD)
        write_atomic(partial / MANIFEST, manifest)
        files.sync_folders(partial)
        for tool in staging.iterdir():  # DeepSpeed's zero_to_fp32.py
            if tool != partial:
                tool.replace(self.folder / tool.name)
        if is_folder(final):
            final.rename(old)
        partial.rename(final)
        staging.rmdir()
        files.sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _point(self, iteration: int) -> None:
        for pointer, form in self.names.pointers:
            write_atomic(self.folder / pointer, form.format(iteration).encode())
        files.sync_folder(self.folder)

    def _clear(self) -> None:
        """Removes what killed runs have left of their saves and of their start; what cannot be removed stays."""
        for unfinished in left_hidden(self.folder, PART):
            shutil.rmtree(hidden(unfinished, PART), ignore_errors=True)
        for name in (_PROBE, *(pointer for pointer, _ in self.names.pointers)):
            remove_left_files(self.folder / name)

    def _restore(self) -> None:
        """Restores a checkpoint that was set aside for another of the same name, if that was never finished."""
        for final in left_hidden(self.folder, OLD):
            if is_complete(final):
                shutil.rmtree(hidden(final, OLD), ignore_errors=True)
            elif not os.path.lexists(final):
                hidden(final, OLD).rename(final)

    def _prune(self, keep: int | None, iteration: int) -> None:
        if keep is None:
            return
        folders = {found: self.folder / self.names.folder(found) for found in self.names.found(self.folder)}
        complete = {found: is_complete(path) for found, path in folders.items()}
        manifests = {found: read_manifest(path) for found, path in folders.items()}
        ill = [found for found, it in manifests.items() if isinstance(it, Manifest) and it.ill is not None]
        for old in files.to_remove(complete, keep, iteration, ill):
            path = self.folder / self.names.folder(old)
            # Renamed first: a half-removed folder must not look like a checkpoint.
            doomed = hidden(path, PART)
            if is_folder(path):  # a link to one on another disk is somebody's own
                with suppress(OSError):  # what cannot be removed stays; a full disk is reported by the next save
                    shutil.rmtree(path.rename(doomed), ignore_errors=True)


def _leader(folder: Path, ranks: Ranks) -> int:
    """Returns the lowest rank that sees the same files in ``folder`` as this one."""
    folder.mkdir(parents=True, exist_ok=True)
    token = [secrets.token_hex(4)]
    dist.broadcast_object_list(token, src=0)
    local_ranks: list[int] = [0] * ranks.world_size
    dist.all_gather_object(local_ranks, ranks.local_rank)
    candidates = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == min(local_ranks)]
    probes = {rank: partial_of(folder / _PROBE, rank, token[0]) for rank in (*candidates, ranks.rank)}
    if ranks.rank in candidates:
        probes[ranks.rank].touch()
    barrier()
    # Looked up by name: a directory listing could come from a network file system's cache.
    leader = next((rank for rank in candidates if probes[rank].exists()), ranks.rank)
    barrier()
    probes[ranks.rank].unlink(missing_ok=True)
    return leader
