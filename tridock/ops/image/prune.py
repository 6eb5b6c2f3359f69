"""Removes only those older images of a cluster that Tridock brought to its hosts."""

from dataclasses import dataclass, replace

from tridock.command import Command
from tridock.ops.hosts.session import Session
from tridock.remote import Host

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
    """The ids of one host's older images."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def prune(session: Session) -> dict[str, Pruned]:
    """Removes the unused images that earlier commands brought to the hosts of this cluster."""
    transport, image = session.transport, session.cluster.settings.image

    def remove(node: str, host: Host) -> Pruned:
        done = host.run(Command.of("sh", "-c", _PRUNE, "prune", transport.images_file(node), image), timeout=600.0)
        lines = replace(done, command="docker image rm").checked(node).stdout.decode().splitlines()
        fates = [line.split(" ") for line in lines]
        return Pruned(*(tuple(id_ for fate, id_ in fates if fate == which) for which in ("removed", "kept")))

    return session.each(remove)
