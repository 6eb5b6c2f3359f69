"""TCP ports of this node: a free one for the rendezvous, or the process that holds a given one."""

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from tridock.contracts.node_answers import PortAnswer
from tridock.contracts.run_folder import RENDEZVOUS_PORTS
from tridock.errors import Problem

_LISTEN = "0A"


def rendezvous_port(wanted: int | None = None) -> PortAnswer:
    """Returns the ``wanted`` port if it is free, or any free one, or the reason why there is none."""
    port = next(filter(is_free, random.sample(RENDEZVOUS_PORTS, 200) if wanted is None else [wanted]), None)
    if port is not None:
        return PortAnswer(port)
    if wanted is not None:
        got = holder(wanted) or "a process that cannot be seen from here"
        return PortAnswer(problem=Problem(f"port {wanted}", "is taken", got, "use another"))
    what = f"none of 200 tried from {RENDEZVOUS_PORTS.start} to {RENDEZVOUS_PORTS.stop - 1} is free"
    return PortAnswer(problem=Problem("ports", what, "", "give launch.master_port, or end what listens there"))


def is_free(port: int) -> bool:
    """Whether a server can listen on the port, on all addresses."""
    return all(_can_listen(family, port) for family in (socket.AF_INET, socket.AF_INET6))


def _can_listen(family: socket.AddressFamily, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # no addresses of this family, so nothing listens there
    with probe:
        # Like the rendezvous itself: a port in TIME_WAIT is usable.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def holder(port: int) -> str | None:
    """Returns ``name (pid N)`` of the process that listens on the port, if this container can see it."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if any(str(link.readlink()) in inodes for link in (entry / "fd").iterdir()):
                return f"{(entry / 'comm').read_text().strip()} (pid {entry.name})"
        except OSError:
            continue
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
