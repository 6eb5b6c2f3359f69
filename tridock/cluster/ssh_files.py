"""The files of a node's ``/run/tridock/secrets``: its keys, and what its ssh and sshd know of the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tridock.cluster.keys import ClusterKeys
from tridock.cluster.settings import Cluster, ClusterNode
from tridock.contracts import cluster_ssh, run_folder

CLIENT_KEY: Final = "id_ed25519"
CLIENT_PUBLIC: Final = "id_ed25519.pub"
AUTHORIZED_KEYS: Final = "authorized_keys"
HOST_KEY: Final = "ssh_host_ed25519_key"
HOST_PUBLIC: Final = "ssh_host_ed25519_key.pub"
KNOWN_HOSTS: Final = "known_hosts"
SSH_CONFIG: Final = "ssh_config"
NODE_FILES: Final = (CLIENT_KEY, CLIENT_PUBLIC, AUTHORIZED_KEYS, HOST_KEY, HOST_PUBLIC, KNOWN_HOSTS, SSH_CONFIG)


def node_files(cluster: Cluster, keys: ClusterKeys, node: str) -> dict[str, bytes]:
    """File names and contents for one node."""
    host_key = keys.hosts[node]
    comment = f"tridock-{cluster.name}"
    return {
        CLIENT_KEY: keys.client.private,
        CLIENT_PUBLIC: f"{keys.client.public} {comment}\n".encode(),
        AUTHORIZED_KEYS: authorized_keys(cluster, keys).encode(),
        HOST_KEY: host_key.private,
        HOST_PUBLIC: f"{host_key.public} {comment}-{node}\n".encode(),
        KNOWN_HOSTS: known_hosts(cluster, keys).encode(),
        SSH_CONFIG: ssh_config(cluster).encode(),
    }


def authorized_keys(cluster: Cluster, keys: ClusterKeys) -> str:
    """Lets the cluster's key in, to run commands (with a terminal if asked for one) and nothing else."""
    return f"restrict,pty {keys.client.public} tridock-{cluster.name}\n"


def known_hosts(cluster: Cluster, keys: ClusterKeys) -> str:
    """Every node's host key, under every name by which another node may call it."""
    return "".join(
        f"{','.join(_known_names(cluster, node))} {keys.hosts[node.name].public}\n" for node in cluster.nodes
    )


def _known_names(cluster: Cluster, node: ClusterNode) -> Mapping[str, None]:
    port = cluster.settings.ssh_port
    # ssh asks for [name]:port, other programs that read the file for the bare name; both in lower case.
    names = [name.lower() for name in _names(node)]
    return dict.fromkeys(form for name in names for form in (name, f"[{name}]:{port}"))


def _names(node: ClusterNode) -> Mapping[str, None]:
    return dict.fromkeys((node.name, node.host, node.address))


def ssh_config(cluster: Cluster, secrets: str = run_folder.SECRETS) -> str:
    """How a node's ssh reaches the others. Says nothing about hosts outside the cluster.

    ``secrets`` is the folder that holds the node's files.
    """
    blocks = [_addressed(node, _names(node)) for node in cluster.nodes]
    everyone = " ".join(name for node in cluster.nodes for name in _names(node))
    common = {
        "Port": str(cluster.settings.ssh_port),
        "User": run_folder.USER,
        "IdentityFile": f"{secrets}/{CLIENT_KEY}",
        "UserKnownHostsFile": f"{secrets}/{KNOWN_HOSTS}",
        **cluster_ssh.CONFIG,
    }
    blocks.append(f"Host {everyone}\n" + "".join(f"    {name} {value}\n" for name, value in common.items()))
    return "\n".join(blocks)


def _addressed(node: ClusterNode, names: Mapping[str, None]) -> str:
    # A % begins an escape in HostName; a zone's (fe80::1%eth0) is meant as it stands.
    address = node.address.replace("%", "%%")
    return f"Host {' '.join(names)}\n    HostName {address}\n"
