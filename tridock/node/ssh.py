"""How the head reaches the other nodes: by the cluster's own ssh, to ``python -m tridock.node`` there."""

from __future__ import annotations

import shlex
import sys
from typing import Final

_SSH: Final = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ConnectionAttempts=1"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


def node_command(node: str | None, *words: str) -> list[str]:
    """What runs a verb of ``tridock.node`` on a node; None is this one."""
    command = ["-P", "-m", "tridock.node", *words]
    return [sys.executable, *command] if node is None else [*_SSH, node, shlex.join(["python", *command])]
