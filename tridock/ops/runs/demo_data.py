"""The demo data of a launch that names no experiment, on the nodes that lack it."""

from tridock.command import Command
from tridock.ops.hosts.client import NodeClient
from tridock.ops.nodes.containers import ensure_up
from tridock.remote import Host

_TIMEOUT_S = 60.0
DEMO_DATA = "data/demo"
_DEMO_FILES = tuple(f"stdlib_text_document.{suffix}" for suffix in ("bin", "idx", "json"))


def bring_demo_data(client: NodeClient) -> tuple[str, NodeClient]:
    """Builds the demo data set on the head and copies it to the nodes that lack it; returns a line about it, and a
    client of the nodes.

    Brings the nodes up first: the data set is built in the head's container, so the operator's machine needs no extra
    packages. Only for a launch that names no experiment: other data sets may be large and are copied by `tridock data
    sync`.
    """
    _, client = ensure_up(client)
    head = client.head
    done = client.run_inside(head, "tridock", "data", "demo", "--folder", DEMO_DATA).checked(head)

    def lacks(node: str, host: Host) -> bool:
        there = Command.of(
            "sh", "-c", 'cd "$1" && test -r "$2" && test -r "$3"', "sh", folder_of(node), *_DEMO_FILES[:2]
        )
        return host.run(there, timeout=_TIMEOUT_S).exit_code != 0

    def folder_of(node: str) -> str:
        return f"{client.workspace(node)}/{DEMO_DATA}"

    without_data = tuple(node for node, missing in client.hosts.each(lacks).items() if missing)
    if without_data:
        paths = {name: Command.of("cat", "--", f"{folder_of(head)}/{name}") for name in _DEMO_FILES}
        files = {name: client.hosts[head].run(it, _TIMEOUT_S).checked(head).stdout for name, it in paths.items()}
        client.hosts.each(lambda node, host: host.put_tree(files, folder_of(node)), only=without_data)
    return done.stdout.decode().splitlines()[-1], client
