#!/usr/bin/env python3
"""Whether a port of an address is free: exits 0, or prints the system's error and exits 1.

    can-listen.py ADDRESS PORT

The socket is made the way sshd makes its own, so that what passes here passes there.
"""

import socket
import sys
from pathlib import Path


def complaint(address: str, port: int) -> str | None:
    """The reason why nothing can listen there, or None. No IPv6 on the host is none: sshd passes over it too."""
    flags = socket.AI_PASSIVE | socket.AI_NUMERICSERV
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror as error:
        return str(error.strerror)
    for family, kind, protocol, _, target in found:
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError:
            continue
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind(target)
                listener.listen(1)
            except OSError as error:
                if family == socket.AF_INET6 and target[0] == "::" and not has_ipv6():
                    continue
                return str(error.strerror)
    return None


def has_ipv6() -> bool:
    """Whether any interface, the loopback included, has an IPv6 address."""
    interfaces = Path("/proc/net/if_inet6")
    return interfaces.exists() and bool(interfaces.read_text().strip())


def main() -> None:
    reason = complaint(sys.argv[1], int(sys.argv[2]))
    if reason is not None:
        sys.exit(print(reason) or 1)


if __name__ == "__main__":
    main()
