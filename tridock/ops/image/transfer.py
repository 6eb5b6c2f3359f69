"""Brings an image to a host: inventory, free space, transfer, `docker load`."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.image.archive import Archive, Piece, shared_layers
from tridock.remote import Host

_TIMEOUT_S = 60.0
_CONTAINERD = "io.containerd.snapshotter"
_FIRST_WITH_ZSTD = 23
"""Docker's release; podman, which reports its own as a stand-in for Docker, has lower ones."""
_INVENTORY = r"""
mkdir -p -- "$1" && cd -- "$1" || exit 1
printf 'folder %s\n' "$(df -Pk . | tail -n 1)"
docker info --format '{{.ServerVersion}} {{.DockerRootDir}} {{.Driver}} {{json .DriverStatus}}' | {
  read -r version root store
  printf 'version %s\nstore %s\nroot %s\n' "$version" "$store" "$(df -Pk "$root" 2>/dev/null | tail -n 1)"
}
for file in *; do
  if [ -f "$file" ]; then printf 'file %s %s\n' "$(wc -c <"$file" 2>/dev/null || echo 0)" "$file"; fi
done
images=$(docker image ls --all --quiet --no-trunc | sort -u)
if [ -n "$images" ]; then docker image inspect --format 'layers {{json .RootFS.Layers}}' $images 2>/dev/null; fi
exit 0
"""

# To the reader a lost connection looks like the end of the input; the size distinguishes them.
_RECEIVE = r"""
set -eu; umask 077; cd -- "$1"
part=$2.$$.part; trap 'rm -f -- "$part"' EXIT
cat >"$part"
[ "$(wc -c <"$part")" -eq "$3" ] || { echo "only part of the image arrived" >&2; exit 1; }
mv -f -- "$part" "$2"
"""

_FETCH = r"""
set -eu; umask 077; cd -- "$1"; name=$2 sum=$3; shift 3
part=$name.$$.part; trap 'rm -f -- "$part"' EXIT
"$@" "$name" >"$part"
[ "$(sha256sum <"$part" | cut -d ' ' -f 1)" = "$sum" ] || { echo "other bytes arrived" >&2; exit 1; }
mv -f -- "$part" "$name"
"""

# Files that an interrupted command left and this image does not use.
_TIDY = r"""
cd -- "$1" || exit 1
for file in *; do grep -qxF -- "$file" order || [ "$file" = order ] || rm -rf -- "$file"; done
"""

_LOAD = r"""
set -eu; cd -- "$1"
[ -z "$4" ] || trap 'rm -rf -- "$1"; rmdir -- "${1%/*}" 2>/dev/null || true' EXIT
while read -r name; do cat -- "$name"; done <order | docker load --quiet >/dev/null
printf '%s\n' "$3" >>"$2"
"""

_CLEAR = 'rm -rf -- "$1"; rmdir -- "${1%/*}" 2>/dev/null || true'


@dataclass(frozen=True, slots=True)
class Inventory:
    """A host's inventory: the layers of each image, files of an interrupted command, and free bytes by file system."""

    images: tuple[tuple[str, ...], ...]
    layers_refused: str
    """Why the host takes whole images only; empty if it takes single layers."""
    files: dict[str, int]
    folder: tuple[str, int] | None
    root: tuple[str, int] | None
    zstd: bool = False
    """Whether its Docker can load zstd-compressed layers."""

    def present_layers(self, diff_ids: Sequence[str]) -> int:
        """Returns how many leading layers need not be sent."""
        return 0 if self.layers_refused else shared_layers(diff_ids, self.images)


def parse_inventory(text: str) -> Inventory:
    """Parses what the inventory script prints on a host."""
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    fields = dict(lines)
    files = (value.split(" ", 1) for name, value in lines if name == "file")
    return Inventory(
        images=tuple(tuple(json.loads(value)) for name, value in lines if name == "layers" and value != "null"),
        layers_refused=_layers_refused(fields.get("store", "")),
        files={name: int(size) for size, name in files},
        folder=_space(fields.get("folder", "")),
        root=_space(fields.get("root", "")),
        zstd=_takes_zstd(fields.get("version", "")),
    )


def _layers_refused(store: str) -> str:
    if _CONTAINERD in store:
        return "its Docker uses containerd's image store"
    return "" if store else "its docker info names no storage driver"


def _takes_zstd(version: str) -> bool:
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) >= _FIRST_WITH_ZSTD


def _space(line: str) -> tuple[str, int] | None:
    """Parses a line of ``df -Pk``: mount point and free bytes."""
    columns = line.split()
    return (columns[5], int(columns[3]) * 1024) if len(columns) >= 6 and columns[3].isdecimal() else None


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of an image to one host: its files go to ``folder`` there, its ids to the file ``notes``."""

    node: str
    host: Host
    folder: str
    notes: str

    def inventory(self) -> Inventory:
        done = self.host.run(Command.of("sh", "-c", _INVENTORY, "inventory", self.folder), timeout=_TIMEOUT_S)
        return parse_inventory(replace(done, command=f"look into {self.folder}").checked(self.node).stdout.decode())

    def begin(self, archive: Archive, unpacked: int, inventory: Inventory) -> set[str]:
        """Sends everything outside the pieces, if there is space for all. Returns the pieces that are already there.

        ``unpacked``: bytes of the layers on the host's disk.
        """
        there = {name for name, piece in archive.pieces.items() if inventory.files.get(name) == piece.size}
        missing = archive.size - sum(archive.pieces[name].size for name in there)
        self._refuse_small_disks(missing, archive.size + unpacked, inventory)
        order = "".join(f"{name}\n" for name in archive.files).encode()
        self.host.put_tree({**archive.inline, "order": order}, self.folder, mode=0o600)
        if inventory.files:
            self._do("remove the files of an interrupted command", _TIDY)
        return there

    def receive(self, piece: Piece, progress: Callable[[int], object]) -> None:
        """Sends a piece from the operator's machine."""
        script = Command.of("sh", "-c", _RECEIVE, "receive", self.folder, piece.name, str(piece.size))
        done = self.host.pipe(piece.chunks(), script, progress=progress)
        replace(done, command="receive the image").checked(self.node)

    def fetch(self, piece: Piece, sha256: str, command: Sequence[str]) -> str | None:
        """Makes the host fetch a piece with a command that takes its name. Returns why it failed, or None."""
        done = self.host.run(Command.of("sh", "-c", _FETCH, "fetch", self.folder, piece.name, sha256, *command))
        text = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].strip()
        return None if done.exit_code == 0 else text or f"exit code {done.exit_code}"

    def load(self, ids: Iterable[str], *, clear: bool) -> None:
        """Loads the image, which has these ``ids``; ``clear`` removes the folder even if the load fails."""
        self._do("docker load --quiet", _LOAD, self.notes, " ".join(dict.fromkeys(ids)), "clear" if clear else "")

    def clear(self) -> None:
        """Removes the folder."""
        self._do(f"remove {self.folder}", _CLEAR)

    def _do(self, what: str, script: str, *arguments: str) -> None:
        done = self.host.run(Command.of("sh", "-c", script, what.split()[-1], self.folder, *arguments))
        replace(done, command=what).checked(self.node)

    def _refuse_small_disks(self, to_receive: int, to_load: int, inventory: Inventory) -> None:
        """Raises if the disk is too small: Docker keeps the archive beside the unpacked layers while loading."""
        needed: dict[str, int] = {}
        free: dict[str, int] = {}
        for space, size in ((inventory.folder, to_receive), (inventory.root, to_load)):
            if space is not None:
                name, there = space
                needed[name] = needed.get(name, 0) + size
                free[name] = min(there, free.get(name, there))
        problems = [
            Problem(
                self.node,
                "has too little disk space for the image",
                f"{size / 1e6:,.0f} MB to store, {free[name] / 1e6:,.0f} MB free on {name}",
                "free some space there (docker system df shows Docker's share)",
            )
            for name, size in needed.items()
            if size > free[name]
        ]
        if problems:
            raise ClusterError(problems)
