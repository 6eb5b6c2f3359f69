"""Older images of a cluster: those that Tridock brought to its hosts, and no others."""

from dataclasses import dataclass, replace

from tridock.cluster.transports import SshTransport
from tridock.command import Command
from tridock.ops.hosts.session import Session

# An image that has a name again, or a container, is somebody's: `docker image rm` refuses the latter.
_PRUNE = r"""
if ! [ -e "$1" ]; then exit 0; fi
current=$(docker image inspect --format '{{.Id}}' "$2") || exit 1
for id in $(sort -u "$1"); do
  names=$(docker image inspect --format '{{len .RepoTags}}' "$id" 2>/dev/null) || continue
  if [ "$id" = "$current" ]; then echo "$id" >>"$1.new"; continue; fi
  if [ "$names" = 0 ] && docker image rm "$id" >/dev/null 2>&1; then echo "removed $id"
  else echo "kept $id"; echo "$id" >>"$1.new"; fi
done
mv -f -- "$1.new" "$1"
"""


@dataclass(frozen=True, slots=True)
class Pruned:
    """Ids of one host's older images."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def prune(session: Session) -> dict[str, Pruned]:
    """Removes the images that earlier commands brought to the hosts of this cluster and that nothing uses."""
    transport, image = session.transport, session.cluster.settings.image
    if not isinstance(transport, SshTransport):
        return {}

    def remove(node: str) -> Pruned:
        notes = transport.images_file(session.states()[node].facts)
        done = session.hosts[node].run(Command.of("sh", "-c", _PRUNE, "prune", notes, image), timeout=600.0)
        lines = replace(done, command="docker image rm").checked(node).stdout.decode().splitlines()
        fates = [line.split(" ") for line in lines]
        return Pruned(*(tuple(id_ for fate, id_ in fates if fate == which) for which in ("removed", "kept")))

    return session.each(lambda node, _: remove(node))
