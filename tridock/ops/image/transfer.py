"""An image's way to a host: what the host has of it, whether there is room, the bytes, `docker load`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.image.archive import Archive, ImageParts, shared_layers
from tridock.remote import Host

Bars = Callable[[str, Archive, int], Callable[[int], object]]
"""Shows an archive on its way to a node, from an offset on; the result gets the bytes of each chunk."""

_TIMEOUT_S = 60.0
_CONTAINERD = "io.containerd.snapshotter"
# What an interrupted command has sent has the name of its sender ($2).
_STOCK = r"""
mkdir -p -- "$1" && cd -- "$1" || exit 1
printf 'folder %s\n' "$(df -Pk . | tail -n 1)"
docker info --format '{{.DockerRootDir}} {{.Driver}} {{json .DriverStatus}}' | {
  read -r root store
  printf 'store %s\nroot %s\n' "$store" "$(df -Pk "$root" 2>/dev/null | tail -n 1)"
}
for part in *".$2.part"; do
  if [ -e "$part" ]; then printf 'part %s %s\n' "$(wc -c <"$part")" "$part"; fi
done
images=$(docker image ls --all --quiet --no-trunc | sort -u)
if [ -n "$images" ]; then docker image inspect --format 'layers {{json .RootFS.Layers}}' $images 2>/dev/null; fi
exit 0
"""

# A connection that ends early looks like the end of the input: the size tells the two apart.
_RECEIVE = r"""
set -eu; umask 077; cd -- "$1"
for part in *".$2.part"; do [ "$part" = "$3" ] || rm -f -- "$part"; done
cat >>"$3" || { rm -f -- "$3"; exit 1; }
size=$(wc -c <"$3")
[ "$size" -le "$4" ] || rm -f -- "$3"
[ "$size" -eq "$4" ] || { echo "only part of the image arrived" >&2; exit 1; }
"""

_LOAD = r"""
set -eu; cd -- "$1"
trap 'rm -f -- "$2"; rmdir -- "$1" 2>/dev/null || true' EXIT
docker load --quiet <"$2" >/dev/null
printf '%s\n' "$4" >>"$3"
"""


@dataclass(frozen=True, slots=True)
class Stock:
    """What a host has: the layers of each image, parts of archives, and free space by file system."""

    images: tuple[tuple[str, ...], ...]
    whole: str
    """Why the host takes whole images only; empty where it takes single layers."""
    parts: dict[str, int]
    folder: tuple[str, int] | None
    root: tuple[str, int] | None

    def held(self, diff_ids: Sequence[str]) -> int:
        """How many leading layers need not be sent."""
        return 0 if self.whole else shared_layers(diff_ids, self.images)


def parse_stock(text: str) -> Stock:
    lines = [line.partition(" ")[::2] for line in text.splitlines()]
    fields = dict(lines)
    parts = (value.split(" ", 1) for name, value in lines if name == "part")
    return Stock(
        images=tuple(tuple(json.loads(value)) for name, value in lines if name == "layers" and value != "null"),
        whole=_whole(fields.get("store", "")),
        parts={name: int(size) for size, name in parts},
        folder=_space(fields.get("folder", "")),
        root=_space(fields.get("root", "")),
    )


def _whole(store: str) -> str:
    if _CONTAINERD in store:
        return "its Docker uses containerd's image store"
    return "" if store else "its docker info names no storage driver"


def _space(line: str) -> tuple[str, int] | None:
    """Where a file system is mounted, and its free bytes, from a line of ``df -Pk``."""
    columns = line.split()
    return (columns[5], int(columns[3]) * 1024) if len(columns) >= 6 and columns[3].isdecimal() else None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One image on its way to one host, through ``folder`` there.

    Its ids go into the file ``notes``; ``sender`` is this operator and cluster."""

    node: str
    host: Host
    folder: str
    notes: str
    sender: str
    image_id: str

    def stock(self) -> Stock:
        done = self.host.run(Command.of("sh", "-c", _STOCK, "stock", self.folder, self.sender), timeout=_TIMEOUT_S)
        return parse_stock(replace(done, command=f"look into {self.folder}").checked(self.node).stdout.decode())

    def send(self, parts: ImageParts, held: int, stock: Stock, image: str, bars: Bars) -> None:
        """Brings the layers after the first ``held``, from where an interrupted command ended, and loads them."""
        archive = parts.archive(image, held)
        part = f"{archive.name}.{self.sender}.part"
        start = min(stock.parts.get(part, 0), archive.size)
        self._refuse_small_disks(archive.size - start, archive.size + parts.unpacked_size(held), stock)
        receive = Command.of("sh", "-c", _RECEIVE, "receive", self.folder, self.sender, part, str(archive.size))
        done = self.host.pipe(archive.chunks(start), receive, progress=bars(self.node, archive, start))
        replace(done, command="receive the image").checked(self.node)
        ids = " ".join(dict.fromkeys((*parts.ids, self.image_id)))
        done = self.host.run(Command.of("sh", "-c", _LOAD, "load", self.folder, part, self.notes, ids))
        replace(done, command="docker load --quiet").checked(self.node)

    def _refuse_small_disks(self, to_receive: int, to_load: int, stock: Stock) -> None:
        """Docker keeps the archive beside the unpacked layers until they are loaded."""
        needed: dict[str, int] = {}
        free: dict[str, int] = {}
        for space, size in ((stock.folder, to_receive), (stock.root, to_load)):
            if space is not None:
                name, there = space
                needed[name] = needed.get(name, 0) + size
                free[name] = min(there, free.get(name, there))
        problems = [
            Problem(
                self.node,
                "has too little room for the image",
                f"{size / 1e6:,.0f} MB to store, {free[name] / 1e6:,.0f} MB free on {name}",
                "free some space there (docker system df shows Docker's share)",
            )
            for name, size in needed.items()
            if size > free[name]
        ]
        if problems:
            raise ClusterError(problems)
