"""Checkpoints of a run, brought together from the nodes that have them or parts of them."""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final, Self

from tridock.contracts.checkpoint_files import Delivery, Entry, Illness, Manifest, damage, read_manifest
from tridock.contracts.checkpoints import MANIFEST, saved_in
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import USAGE
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, RequestError, count
from tridock.ops.hosts.client import NODE, NodeClient
from tridock.ops.runs.archives import download, unpack
from tridock.progress import bars, size_text
from tridock.remote import Host

_COPIES: Final = 3
"""Nodes that are asked for a file: all of them may see one disk."""
_LOOK_S: Final = 120.0
_PACK_LISTS: Final = f'cd "$1" 2>/dev/null || exit 0; set -- */{MANIFEST}; [ -e "$1" ] || exit 0; exec tar -cz "$@"'


class Checkpoint:
    """What the nodes that are up have of a checkpoint; ``parts`` are their manifests, the one that takes precedence
    first, and those of the nodes ``outside`` after all others."""

    def __init__(self, iteration: int, name: str, parts: Mapping[str, Manifest], outside: Collection[str] = ()) -> None:
        self.iteration, self.name = iteration, name
        self.ill: Illness | None = next((it.ill for it in parts.values() if it.ill is not None), None)
        self.entries: dict[str, Entry] = {}
        self.nodes: dict[str, list[str]] = defaultdict(list)
        """By file, the nodes that have it."""
        own = [part for node, part in parts.items() if node not in outside]
        # Replicas' files differ by node: what a node has counts before what another one lists of it. On a node that was
        # away meanwhile, another save of the same iteration has other hashes.
        lists = [*(it.here for it in own), *(it.elsewhere for it in own)]
        lists += [them for node in parts if node in outside for them in (parts[node].here, parts[node].elsewhere)]
        for file, entry in (pair for them in lists for pair in them.items()):
            self.entries.setdefault(file, entry)
        for node, part in parts.items():
            for file, entry in part.here.items():
                if self.entries[file] == entry:
                    self.nodes[file].append(node)
        self.lacking = sorted(self.entries.keys() - self.nodes.keys())
        """The files that only other nodes have."""

    def size(self, files: Iterable[str]) -> int:
        """Returns the bytes of some of its files."""
        return sum(self.entries[file].size for file in files)


class _Sizes:
    """Tells progress the sizes that a node prints, one a line."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._rest = progress, b""

    def __call__(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._progress(sum(map(int, filter(bytes.isdigit, lines))))


class SavedCheckpoints:
    """The checkpoints on the nodes that are up, in one folder of theirs; messages name it ``name``."""

    def __init__(self, client: NodeClient, name: str, place: PurePosixPath, found: Iterable[Checkpoint]) -> None:
        self._client, self._name, self._place = client, name, place
        self.by_iteration = {it.iteration: it for it in found}

    @classmethod
    def look(
        cls,
        client: NodeClient,
        name: str,
        place: PurePosixPath,
        folder: Path,
        first: Collection[str],
        optional: Collection[str] = (),
    ) -> Self:
        """Asks every node that is up; ``folder`` is for what they send. Those of the nodes ``first`` take precedence.

        Raises :class:`ClusterError` with those that cannot send theirs; of ``optional`` ones it prints a warning.
        """
        folder.mkdir(exist_ok=True)
        commands = {node: client.inside(node, "sh", "-c", _PACK_LISTS, "sh", str(place)) for node in client.running()}
        names: dict[int, str] = {}
        parts: dict[int, dict[str, Manifest]] = defaultdict(dict)
        archives = download(client, commands, folder, ".lists.tar.gz", "look", None, _LOOK_S, optional)
        for node in sorted(archives, key=lambda it: it not in first):
            if archives[node].stat().st_size:
                unpack(node, archives[node], folder / "lists" / node)
            for iteration, path in saved_in(folder / "lists" / node).items():
                if isinstance(manifest := read_manifest(path), Manifest):
                    names[iteration], parts[iteration][node] = path.name, manifest
        return cls(client, name, place, (Checkpoint(it, names[it], parts[it], optional) for it in sorted(parts)))

    @property
    def whole(self) -> list[int]:
        """The iterations of those of which no file is missing."""
        return [iteration for iteration, it in self.by_iteration.items() if not it.lacking]

    @property
    def newest(self) -> int | None:
        """The newest whole one that is not in ill health: a training continues from it."""
        return max((it for it in self.whole if self.by_iteration[it].ill is None), default=None)

    @property
    def problems(self) -> list[Problem]:
        """Those that are not whole."""
        what, todo = "is not whole on the nodes that are up", "bring up the others (tridock up), then try again"
        return [
            Problem(f"{self._name}/{it.name}", what, f"no {it.lacking[0]}", todo)
            for it in self.by_iteration.values()
            if it.lacking
        ]

    def choose(self, iteration: int | None) -> int:
        """Returns ``iteration``, or that of the newest whole checkpoint: one in ill health only if there is no other.

        Raises :class:`RequestError` if the nodes that are up have no such checkpoint.
        """
        whole, chosen = self.whole, iteration
        if chosen is None:
            chosen = max(whole, default=None) if self.newest is None else self.newest
        if chosen is not None and chosen in whole:
            return chosen
        got = "" if iteration is None else f"--iteration {iteration}"
        todo = f"whole are {', '.join(map(str, whole))}"
        if not whole:
            up = "bring up the nodes that have the rest (tridock up)"
            todo = f"wait until it has saved (train.save_interval), or {up}"
        what = "no whole checkpoint of it is on the nodes that are up"
        raise RequestError(Problem(self._name, what, got, todo))

    def lacking_on(self, nodes: Collection[str], iteration: int) -> list[str]:
        """Returns the files of a whole checkpoint that none of these nodes has."""
        it = self.by_iteration[iteration]
        return [file for file in it.entries if not {*nodes} & {*it.nodes[file]}]

    def bring_to(self, nodes: Collection[str], iteration: int) -> None:
        """Has these nodes get the files of a whole checkpoint that none of them has, each an equal part.

        Raises :class:`ClusterError` with the files of which no copy arrives whole.
        """
        it, lacking = self.by_iteration[iteration], self.lacking_on(nodes, iteration)
        shares: dict[str, list[str]] = {node: [] for node in nodes}
        load = dict.fromkeys(nodes, 0)
        for file in sorted(lacking, key=lambda file: -it.entries[file].size):
            node = min(load, key=load.__getitem__)
            shares[node].append(file)
            load[node] += it.entries[file].size
        with bars(quiet=self._client.hosts.quiet) as begin:
            bar = begin(f"bring {it.name} to the run's nodes", it.size(lacking))

            def deliver(node: str, host: Host) -> None:
                files = {file: it.entries[file] for file in shares[node]}
                rest = {file: entry for file, entry in it.entries.items() if file not in files}
                request = Delivery(files, {file: tuple(it.nodes[file]) for file in files}, rest, it.ill)
                argv = (*NODE, "receive-checkpoint", str(self._place / it.name))
                done = host.read_into(_Sizes(bar), self._client.inside(node, *argv, stdin=encode(request).encode()))
                if done.exit_code == USAGE:
                    raise self._client.other_version(node, "it does not know receive-checkpoint")
                replace(done, command=f"get its part of {it.name}").checked(node)

            self._client.hosts.each(deliver, only=[node for node, files in shares.items() if files])

    def bring(self, iteration: int, folder: Path, here: Path, target: Path) -> None:
        """Downloads a whole checkpoint to a folder in ``target``, without the files that are whole in ``here`` already.

        Each is compared with its hash; another node's copy replaces one that has changed or is missing. ``folder`` is
        for what the nodes send. Raises :class:`ClusterError` with the files of which no copy is whole.
        """
        it = self.by_iteration[iteration]
        here, target = here / it.name, target / it.name
        missing = [file for file in it.entries if any(damage(here, it.entries, [file], read=True))]
        if not self._client.hosts.quiet:
            total = f"{count(len(it.entries), 'file')}, {size_text(it.size(it.entries))}"
            rest = "" if len(missing) == len(it.entries) else f"; {size_text(it.size(missing))} are not here yet"
            print(f"{self._name}: fetch the checkpoint of iteration {iteration}, {total}{rest}", file=sys.stderr)
        untried = {file: it.nodes[file][:_COPIES] for file in missing}
        damaged: dict[str, list[Problem]] = defaultdict(list)
        while missing:
            if bad := [problem for file in missing if not untried[file] for problem in damaged[file]]:
                self._refuse_if_gone(it, folder)
                raise ClusterError(bad)
            asked = {file: untried[file].pop(0) for file in missing}
            self._download(it, asked, folder, target)
            for file, node in asked.items():
                where = f"{self._name}/{it.name}/{file} on {node}"
                found = [replace(problem, where=where) for problem in damage(target, it.entries, [file], read=True)]
                damaged[file] += found
                if not found:
                    missing.remove(file)
        write_atomic(target / MANIFEST, Manifest(it.entries, ill=it.ill).to_bytes())

    def _download(self, it: Checkpoint, asked: Mapping[str, str], folder: Path, target: Path) -> None:
        """Downloads files, each from a node; one that it cannot read does not come."""
        argv = ("tar", "-C", str(self._place / it.name), "-c", "--ignore-failed-read", "--null", "-T", "-")
        files: dict[str, list[str]] = defaultdict(list)
        for file, node in asked.items():
            files[node].append(file)
        names = {node: "\0".join(own).encode(errors="surrogateescape") for node, own in files.items()}
        commands = {node: self._client.inside(node, *argv, stdin=own) for node, own in names.items()}
        try:
            archives = download(self._client, commands, folder, ".tar", f"fetch {self._name}", it.size(asked))
        except ClusterError:
            self._refuse_if_gone(it, folder)
            raise
        for node, archive in archives.items():
            unpack(node, archive, target)
            archive.unlink()

    def _refuse_if_gone(self, it: Checkpoint, folder: Path) -> None:
        if it.iteration not in self.look(self._client, self._name, self._place, folder / "again", ()).by_iteration:
            what = f"the checkpoint of iteration {it.iteration} was removed while it was fetched"
            todo = "try again; train.keep_checkpoints is how many a run keeps"
            raise ClusterError(Problem(self._name, what, "", todo)) from None
