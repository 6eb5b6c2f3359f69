"""Runs commands and transfers files on hosts, over SSH or on this machine, with bounded concurrency and time limits."""

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.remote.fanout import Outcome, on_all, raise_failures
from tridock.remote.host import Completed, Host, Stream
from tridock.remote.local import LocalHost
from tridock.remote.ssh import SshHost

__all__ = ["Completed", "Host", "LocalHost", "Outcome", "SshHost", "Stream", "connect", "on_all", "raise_failures"]


def connect(cluster: Cluster) -> dict[str, Host]:
    """Returns the hosts by node name: the nodes in use, then the spares. Contacts none of them."""
    if not transport_of(cluster).separate_hosts:
        return {node: LocalHost(node) for node in cluster.everywhere}
    ssh = cluster.settings.ssh
    return {
        node: SshHost(
            node,
            address=cluster.host_of(node),
            user=ssh.user,
            port=ssh.port,
            identity_file=ssh.identity_file,
            config_file=ssh.config_file,
            connect_timeout=ssh.connect_timeout,
            retries=ssh.retries,
        )
        for node in cluster.everywhere
    }
