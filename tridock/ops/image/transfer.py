"""Brings an image to a host: inventory, free space, transfer, `docker load`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.image.archive import Archive, Blob, Piece, digest_of, shared_layers
from tridock.ops.image.blobs import JSON_LIMIT, blobs_of, closest, parse_saved
from tridock.remote import Host

_TIMEOUT_S = 60.0
_CONTAINERD = "io.containerd.snapshotter"
_FIRST_WITH_ZSTD = 23
"""Docker's release; podman, which reports its own as a stand-in for Docker, has lower ones."""
_FIRST_THAT_CHECKS = 28
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
if [ -n "$images" ]; then docker image inspect --format 'layers {{.Id}} {{json .RootFS.Layers}}' $images 2>/dev/null; fi
for file in "$2"/*; do
  [ -f "$file" ] || continue
  id=${file##*/}
  case $images in
    *"$id"*) printf 'manifest sha256:%s %s\n' "$id" "$(cat -- "$file")";;
    *) rm -f -- "$file";;
  esac
done
exit 0
"""

# One line for each file of `docker save`; documents with their content. The layers go no further than this host.
_LIST_SAVED = r"""
export LIMIT=$2
docker save "$1" | tar -x -f - --to-command='
  if [ "$TAR_SIZE" -le "$LIMIT" ] && [ "$(dd bs=1 count=1 2>/dev/null)" = "{" ]; then
    printf "json %s %s %s\n" "$TAR_FILENAME" "$TAR_SIZE" "$({ printf "{"; cat; } | base64 -w 0)"
  else
    cat >/dev/null; printf "blob %s %s\n" "$TAR_FILENAME" "$TAR_SIZE"
  fi'
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

# An archive of a few megabytes is the script's own input: on many hosts every process counts, and every byte written.
# If the connection is lost, docker load refuses what is cut off, at whichever file that is.
_LOAD = r"""
set -eu; folder=$1 notes=$2 ids=$3 pieces=$4 platform=
[ -n "$pieces" ] || trap 'rm -rf -- "$folder"; rmdir -- "${folder%/*}" 2>/dev/null || true' EXIT
load() {
  if [ -z "$pieces" ]; then docker load --quiet $platform; return; fi
  while read -r name; do cat -- "$folder/$name"; done <"$folder/order" | docker load --quiet $platform
}
"""
_LOAD_LAYERS = (
    _LOAD
    + r"""load >/dev/null
printf '%s\n' "$ids" >>"$notes"
"""
)

# `docker load` accepts an archive whose layers are neither in it nor in the store. Docker 28 and later check that with
# --platform; older ones do not list such an image. A container that never starts shows that the layers are unpacked.
_LOAD_BLOBS = (
    _LOAD
    + r"""id=$5 source=$6 check=$7 manifests=$8 manifest=$9
if [ -n "$source" ]; then
  docker image inspect "$source" >/dev/null 2>&1 || { echo "the image with the other layers is gone" >&2; exit 1; }
  [ -z "$check" ] || platform=--platform=$(docker version --format '{{.Server.Os}}/{{.Server.Arch}}')
fi
error=$(load 2>&1 >/dev/null) || {
  case $error in *"requested platform"*) error="layers of the image are missing";; esac
  printf '%s\n' "$error" >&2; exit 1
}
docker image ls --all --quiet --no-trunc | grep -qxF -- "$id" || { echo "layers of the image are missing" >&2; exit 1; }
test=tridock-load-${id#sha256:}
docker rm --force --volumes "$test" >/dev/null 2>&1 || true
docker create --pull never --name "$test" "$id" true >/dev/null
docker rm --volumes "$test" >/dev/null
mkdir -p -- "$manifests"; printf %s "$manifest" >"$manifests/${id#sha256:}"
printf '%s\n' "$ids" >>"$notes"
"""
)

_CLEAR = 'rm -rf -- "$1"; rmdir -- "${1%/*}" 2>/dev/null || true'


@dataclass(frozen=True, slots=True)
class Inventory:
    """A host's inventory: the layers of each image, files of an interrupted command, and free bytes by file system."""

    images: Mapping[str, tuple[str, ...]]
    layers_refused: str
    """Why the host takes whole images only; empty if it takes single layers."""
    files: dict[str, int]
    folder: tuple[str, int] | None
    root: tuple[str, int] | None
    zstd: bool = False
    """Whether its Docker can load zstd-compressed layers."""
    containerd: bool = False
    """Whether its Docker uses containerd's image store."""
    checks_load: bool = False
    """Whether its Docker can check that a loaded image is complete."""
    manifests: Mapping[str, bytes] = field(default_factory=dict)
    """The manifests of images that it was sent, by id; only with containerd's image store."""
    source: str = ""
    """The image in containerd's image store that has ``blobs``."""
    blobs: tuple[Blob, ...] = ()
    """The leading layers that are in containerd's image store."""

    def present_layers(self, diff_ids: Sequence[str]) -> int:
        """Returns how many leading layers need not be sent."""
        if self.layers_refused:
            return 0
        return len(self.blobs) if self.containerd else shared_layers(diff_ids, self.images.values())

    def whole(self, reason: str) -> "Inventory":
        """Returns the inventory of a host that takes only the whole image."""
        return replace(self, layers_refused=reason, source="", blobs=())


def parse_inventory(text: str) -> Inventory:
    """Parses what the inventory script prints on a host."""
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    fields = dict(lines)
    files = (value.split(" ", 1) for name, value in lines if name == "file")
    images = (value.split(" ", 1) for name, value in lines if name == "layers")
    manifests = (value.split(" ", 1) for name, value in lines if name == "manifest")
    store, release = fields.get("store", ""), _release(fields.get("version", ""))
    return Inventory(
        images={image: tuple(json.loads(layers)) for image, layers in images if layers != "null"},
        layers_refused="" if store else "its docker info names no storage driver",
        files={name: int(size) for size, name in files},
        folder=_space(fields.get("folder", "")),
        root=_space(fields.get("root", "")),
        zstd=release >= _FIRST_WITH_ZSTD,
        containerd=_CONTAINERD in store,
        checks_load=release >= _FIRST_THAT_CHECKS,
        manifests={id_: text.encode() for id_, text in manifests if digest_of(text.encode()) == id_},
    )


def _release(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdecimal() else 0


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

    @property
    def manifests(self) -> str:
        """The folder on the host for the manifests of images in containerd's image store."""
        return f"{self.notes}.manifests"

    def inventory(self, diff_ids: Sequence[str] = (), note: Callable[[str], object] = lambda _: None) -> Inventory:
        """Returns the host's inventory; with containerd's image store, which blobs of these layers it has."""
        script = Command.of("sh", "-c", _INVENTORY, "inventory", self.folder, self.manifests)
        done = self.host.run(script, timeout=_TIMEOUT_S)
        text = replace(done, command=f"look into {self.folder}").checked(self.node).stdout.decode()
        inventory = parse_inventory(text)
        source = closest(diff_ids, inventory.images, inventory.manifests)
        if not inventory.containerd or not source.shared:
            return inventory
        if manifest := inventory.manifests.get(source.image):
            blobs = blobs_of(manifest)
        else:
            note(f"{self.node}: reads its image {source.image[:19]} once, to see which layers its store has")
            blobs, reason = self._saved_blobs(source.image, inventory.images[source.image])
            if not blobs:
                return inventory.whole(f"docker save {source.image[:19]} gives no layers there: {reason}")
        return replace(inventory, source=source.image, blobs=blobs[: source.shared])

    def _saved_blobs(self, image: str, diff_ids: Sequence[str]) -> tuple[tuple[Blob, ...], str]:
        """Returns the blobs of an image that somebody else brought to the host, or none and the reason."""
        done = self.host.run(Command.of("sh", "-c", _LIST_SAVED, "list", image, str(JSON_LIMIT)))
        if done.exit_code:
            return (), done.stderr.decode(errors="replace").strip().partition("\n")[0] or f"exit code {done.exit_code}"
        return parse_saved(done.stdout.decode(), diff_ids), "a part of the image is missing"

    def begin(self, archive: Archive, unpacked: int, inventory: Inventory) -> set[str]:
        """Sends everything outside the pieces, if there is space for all. Returns the pieces that are already there.

        ``unpacked``: bytes of the layers on the host's disk. An archive without pieces is sent by :meth:`load`.
        """
        there = {name for name, piece in archive.pieces.items() if inventory.files.get(name) == piece.size}
        missing = archive.size - sum(archive.pieces[name].size for name in there) if archive.pieces else 0
        self._refuse_small_disks(missing, archive.size + unpacked, inventory)
        if archive.pieces:
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
        return None if done.exit_code == 0 else _last_line(done.stderr) or f"exit code {done.exit_code}"

    def load(self, archive: Archive, ids: Iterable[str], inventory: Inventory) -> str:
        """Loads the image, which has these ``ids``. Sends an archive without pieces, and then removes the folder.

        Returns why containerd's image store cannot complete an archive that lacks layers, else an empty string.
        """
        arguments = self.folder, self.notes, " ".join(dict.fromkeys(ids)), "pieces" if archive.pieces else ""
        script = Command.of("sh", "-c", _LOAD_LAYERS, "load", *arguments)
        if inventory.containerd:
            image, check = digest_of(archive.manifest), "check" if inventory.checks_load else ""
            more = image, inventory.source, check, self.manifests, archive.manifest.decode()
            script = Command.of("sh", "-c", _LOAD_BLOBS, "load", *arguments, *more)
        done = self.host.pipe(() if archive.pieces else archive.inline.values(), script)
        if done.exit_code and inventory.blobs:
            return _last_line(done.stderr) or f"exit code {done.exit_code}"
        replace(done, command="docker load --quiet").checked(self.node)
        return ""

    def clear(self) -> None:
        """Removes the folder."""
        self._do(f"remove {self.folder}", _CLEAR)

    def _do(self, what: str, script: str) -> None:
        done = self.host.run(Command.of("sh", "-c", script, what.split()[-1], self.folder))
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


def _last_line(stderr: bytes) -> str:
    return stderr.decode(errors="replace").strip().rpartition("\n")[2].strip()
