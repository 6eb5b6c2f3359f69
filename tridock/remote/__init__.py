"""Runs commands and transfers files on hosts, over SSH or on this machine, with bounded concurrency and time limits."""

from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.remote.fanout import Outcome, on_all, raise_failures
from tridock.remote.host import Completed, Host, LocalHost, Stream
from tridock.remote.ssh import Login, SshHost

__all__ = ["Completed", "Host", "LocalHost", "Outcome", "Stream", "connect", "on_all", "raise_failures"]


def connect(cluster: Cluster, *, once: bool = False) -> dict[str, Host]:
    """Returns the hosts by node name: the nodes in use, then the spares. Contacts none of them.

    ``once``: a login that fails is not tried again, nor asked for at the terminal.
    """
    if not transport_of(cluster).separate_hosts:
        return {node: LocalHost(node) for node in cluster.everywhere}
    ssh = cluster.settings.ssh
    return {
        node: SshHost(
            node,
            Login(cluster.node(node).host, ssh.user, ssh.port, ssh.identity_file, ssh.config_file, ssh.connect_timeout),
            0 if once else ssh.retries,
            may_ask=not once,
        )
        for node in cluster.everywhere
    }
