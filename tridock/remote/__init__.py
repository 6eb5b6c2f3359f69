"""Runs commands and transfers files on hosts, over SSH or on this machine, with bounded concurrency and time limits."""

from functools import partial

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.remote.fanout import Outcome, on_all, raise_failures
from tridock.remote.host import Completed, Host, Stream
from tridock.remote.local import LocalHost
from tridock.remote.ssh_config import Lookups, Wanted

__all__ = ["Completed", "Host", "LocalHost", "Outcome", "Stream", "connect", "on_all", "raise_failures"]


def connect(cluster: Cluster) -> dict[str, Host]:
    """Returns the hosts by node name: the nodes in use, then the spares. Contacts none of them."""
    if not transport_of(cluster).separate_hosts:
        return {node: LocalHost(node) for node in cluster.everywhere}
    ssh, addresses = cluster.settings.ssh, {node: cluster.host_of(node) for node in cluster.everywhere}
    lookups = Lookups(addresses, Wanted(ssh.user, ssh.port, ssh.identity_file, ssh.config_file))

    from tridock.remote.ssh import SshHost  # loads Fabric, while the lookups run

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
            look_up=partial(lookups.target, node),
        )
        for node, address in addresses.items()
    }
