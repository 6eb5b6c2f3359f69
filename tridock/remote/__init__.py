"""Runs commands and transfers files on hosts, over SSH or on this machine, with bounded concurrency and time limits."""

from functools import partial

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.remote.ahead import Ahead
from tridock.remote.fanout import Outcome, on_all, raise_failures
from tridock.remote.host import Completed, Host, Stream
from tridock.remote.local import LocalHost
from tridock.remote.ssh_config import Wanted, resolve

__all__ = ["Completed", "Host", "LocalHost", "Outcome", "Stream", "connect", "on_all", "raise_failures"]


def connect(cluster: Cluster, *, ahead: bool = False) -> dict[str, Host]:
    """Returns the hosts by node name: the nodes in use, then the spares.

    Contacts none of them, unless ``ahead``: then connections open from now on until the first host is used.
    """
    if not transport_of(cluster).separate_hosts:
        return {node: LocalHost(node) for node in cluster.everywhere}
    ssh, addresses = cluster.settings.ssh, {node: cluster.host_of(node) for node in cluster.everywhere}
    wanted = Wanted(ssh.user, ssh.port, ssh.identity_file, ssh.config_file)
    look_ups = {node: partial(resolve, node, address, wanted) for node, address in addresses.items()}
    if ahead:  # each is a process, which takes as long as half a login
        targets = Ahead(look_ups, 1, on=True)
        look_ups = {node: partial(targets.result, node) for node in addresses}

    from tridock.remote.ssh import SshHost  # loads Fabric meanwhile

    hosts = {
        node: SshHost(
            node,
            address=address,
            user=ssh.user,
            port=ssh.port,
            identity_file=ssh.identity_file,
            config_file=ssh.config_file,
            connect_timeout=ssh.connect_timeout,
            retries=ssh.retries,
            look_up=look_ups[node],
        )
        for node, address in addresses.items()
    }
    if ahead:
        connections = Ahead({node: host.connector.connect for node, host in hosts.items()}, ssh.max_connections)
        for node, host in hosts.items():
            host.connects_first_by(partial(connections.result, node))
    return {**hosts}
