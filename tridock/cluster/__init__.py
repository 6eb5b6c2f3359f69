"""The cluster: hostfile, settings, key material and ssh's files. Nothing here contacts a host."""

from tridock.cluster.hostfile import Hostfile, Node, load_hostfile, parse_hostfile
from tridock.cluster.schema import Settings, parse_settings
from tridock.cluster.settings import Cluster, ClusterNode, load_cluster

__all__ = [
    "Cluster",
    "ClusterNode",
    "Hostfile",
    "Node",
    "Settings",
    "load_cluster",
    "load_hostfile",
    "parse_hostfile",
    "parse_settings",
]
