"""Ensures the cluster's image: identifies it, brings it to every host that lacks it, and removes older ones."""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tridock.cluster.schema import CPU_IMAGE, IMAGE
from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.facts import States, read_states
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.wrap import image_id
from tridock.ops.project import wait_for_lock
from tridock.remote import Host


def with_built_image(cluster: Cluster) -> Cluster:
    """Returns the cluster with the image that was built here, if the settings name none."""
    named = cluster.wraps is not None or "image" in cluster.settings.model_fields_set
    if named or image_id(IMAGE) is not None or image_id(CPU_IMAGE) is None:
        return cluster
    return cluster.with_image(CPU_IMAGE, wrap=False)


def ensure_image(hosts: Hosts, wanted: str) -> None:
    """Brings the image to every host that lacks it. :func:`verify` says whether the hosts have it then."""
    from tridock.ops.image.pull import KNOWN, bring  # most commands send no image

    with _cache(hosts.cluster) as folder:
        if missing := lacking(read_states(hosts), wanted):  # another command may just have brought it
            bring(hosts, wanted, missing, folder)
            for path in folder.iterdir():
                if path.name != KNOWN:
                    path.unlink()


def lacking(states: States, wanted: str) -> tuple[str, ...]:
    return tuple(node for node, state in states.items() if not state.has(wanted))


def wanted_image(cluster: Cluster, states: States) -> str:
    """Returns the id of the operator's image, or if there is none here, of the one that all hosts agree on."""
    image, container = cluster.settings.image, cluster.settings.container
    with_gpus = [node for node, state in states.items() if state.facts.gpus]
    if image == CPU_IMAGE and transport_of(cluster).separate_hosts and container.gpus != "none" and with_gpus:
        todo = "run tridock image here, or set container.gpus: none"
        raise ClusterError(Problem(image, "cannot use the GPUs of these hosts", ", ".join(with_gpus), todo))
    if (local := image_id(image)) is not None:
        return local
    found = {state.image_id for state in states.values()}
    if len(found) == 1 and (only := found.pop()) is not None:
        return only
    flavor = " --flavor cpu" if image.endswith(":cpu") else ""
    ids = ((node, state.image_id) for node, state in states.items())
    got = ", ".join(f"{id_[:19]} on {node}" if id_ else f"none on {node}" for node, id_ in ids)
    todo = f"run tridock image{flavor} here"
    raise ClusterError(Problem(image, "is not on this machine, and not the same on every host", got, todo))


@contextmanager
def _cache(cluster: Cluster) -> Iterator[Path]:
    """Locks and yields this cluster's layer cache on the operator's machine.

    The layers that an interrupted command exported are reused by the next.
    """
    sender = f"{socket.gethostname()} {os.getuid()} {cluster.state_folder}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "tridock" / "layers" / hashlib.sha256(sender.encode()).hexdigest()[:16]
    todo = "make it yours to write, or set XDG_CACHE_HOME to another folder"
    with ClusterError.in_place_of(OSError, folder, "cannot be used for layers", todo):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = folder.with_suffix(".lock").open("w")
    with lock:
        wait_for_lock(lock, f"another command brings an image to {cluster.name}")
        for part in folder.glob("*.part"):
            if part.is_file():
                part.unlink()
        yield folder


def verify(states: States, wanted: str) -> None:
    """Raises :class:`ClusterError` with each host that lacks the image, though it was sent there."""
    wrong = [(node, state.image_id) for node, state in states.items() if not state.has(wanted)]
    if wrong:
        raise ClusterError(
            Problem(node, f"has another image than {wanted}", str(found), "look at docker images there")
            for node, found in wrong
        )


# An image with a name or a container is in use: `docker image rm` refuses the latter.
_PRUNE = r"""
case $1 in '~'/*) list=$HOME/${1#*/};; *) list=$1;; esac
if ! [ -e "$list" ]; then exit 0; fi
current=$(docker image inspect --format '{{.Id}}' "$2") || exit 1
sort -u "$list" | while read -r ids; do
  case " $ids " in *" $current "*) echo "$ids" >>"$list.new"; continue;; esac
  for id in $ids; do
    names=$(docker image inspect --format '{{len .RepoTags}}' "$id" 2>/dev/null) || continue
    if [ "$names" = 0 ] && docker image rm "$id" >/dev/null 2>&1; then echo "removed $id"; break; fi
    echo "kept $id"; echo "$ids" >>"$list.new"; break
  done
done
mv -f -- "$list.new" "$list"
"""


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def prune(hosts: Hosts) -> dict[str, Pruned]:
    """Removes the unused images that earlier commands brought to the hosts of this cluster."""
    transport, image = hosts.transport, hosts.cluster.settings.image

    def remove(node: str, host: Host) -> Pruned:
        done = host.run(Command.of("sh", "-c", _PRUNE, "prune", transport.images_file(node), image), timeout=600.0)
        lines = replace(done, command="docker image rm").checked(node).stdout.decode().splitlines()
        fates = [line.split(" ") for line in lines]
        return Pruned(*(tuple(id_ for fate, id_ in fates if fate == which) for which in ("removed", "kept")))

    return hosts.each(remove)
