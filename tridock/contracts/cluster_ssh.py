"""All ssh options between a cluster's nodes: trust, timeouts and keepalives."""

from typing import Final

CONFIG: Final = {
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "PreferredAuthentications": "publickey",
    "GlobalKnownHostsFile": "none",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
    "HostKeyAlgorithms": "ssh-ed25519",
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ConnectionAttempts": "2",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ForwardAgent": "no",
    "LogLevel": "ERROR",
}
"""For every node's ``ssh_config``, which pdsh, DeepSpeed's launcher and a user's own ssh read."""

# The supervisor and the doctor retry by themselves, so an unreachable node must fail within seconds.
_QUICK: Final = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ConnectionAttempts=1")
SUPERVISOR: Final = ("ssh", "-T", *_QUICK, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""A node's ssh to another one: the supervisor's, and rsync's."""
PROBE: Final = ("ssh", "-a", "-x", *_QUICK)
"""The doctor's ssh from the head to a node, with the options of pdsh."""
