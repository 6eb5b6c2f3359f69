"""Runs commands and transfers files on hosts, over SSH or on this machine, with bounded concurrency and time limits."""

from collections.abc import Mapping
from functools import partial

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.remote.ahead import Ahead
from tridock.remote.fanout import Outcome, on_all, raise_failures
from tridock.remote.host import Completed, Host, Stream
from tridock.remote.local import LocalHost
from tridock.remote.ssh_config import Wanted, resolve

__all__ = [
    "Completed",
    "Host",
    "LocalHost",
    "Outcome",
    "Stream",
    "connect",
    "connect_ahead",
    "on_all",
    "raise_failures",
]


def connect(cluster: Cluster) -> dict[str, Host]:
    """Returns the hosts by node name: the nodes in use, then the spares. Contacts none of them."""
    if not transport_of(cluster).separate_hosts:
        return {node: LocalHost(node) for node in cluster.everywhere}
    ssh, addresses = cluster.settings.ssh, {node: cluster.host_of(node) for node in cluster.everywhere}
    wanted = Wanted(ssh.user, ssh.port, ssh.identity_file, ssh.config_file)
    # Each is a process, which takes as long as half a login.
    targets = Ahead({node: partial(resolve, node, address, wanted) for node, address in addresses.items()}, 1, on=True)

    from tridock.remote.ssh import SshHost  # loads Fabric meanwhile

    return {
        node: SshHost(
            node,
            address=address,
            user=ssh.user,
            port=ssh.port,
            identity_file=ssh.identity_file,
            config_file=ssh.config_file,
            connect_timeout=ssh.connect_timeout,
            retries=ssh.retries,
            look_up=partial(targets.result, node),
        )
        for node, address in addresses.items()
    }


def connect_ahead(hosts: Mapping[str, Host], cap: int) -> None:
    """Begins to connect to hosts, at most ``cap`` at once, until the first of them is used."""
    from tridock.remote.ssh import SshHost

    remote = {name: host for name, host in hosts.items() if isinstance(host, SshHost)}
    connections = Ahead({name: host.connector.connect for name, host in remote.items()}, cap)
    for name, host in remote.items():
        host.connects_first_by(partial(connections.result, name))
