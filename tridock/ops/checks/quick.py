"""The quick checks of every launch: what a node reports without starting torch or asking other nodes for more."""

from typing import Final, TypeVar

from tridock.contracts.node_answers import PROTOCOL, HostKey, QuickReport
from tridock.errors import ClusterError
from tridock.ops.checks.consistency import image_findings
from tridock.ops.checks.devices import cuda_findings
from tridock.ops.checks.limits import space_findings
from tridock.ops.checks.network import interface_findings
from tridock.ops.checks.ssh import ssh_findings
from tridock.ops.hosts.client import NodeClient
from tridock.remote import Host

R = TypeVar("R", bound=QuickReport)

REPORT_TIMEOUT_S: Final = 60.0
QUICK: Final = "--quick"


def check_quickly(client: NodeClient, *, on_cpu: bool = False) -> None:
    """Runs the checks of every launch: ssh from the head to every node, the same image, space on disk and in /dev/shm,
    and whether Gloo and NCCL would use an interface that other nodes reach.

    Unless ``on_cpu``, also checks that CUDA starts on nodes with a GPU image and that torch has kernels for their GPUs.
    Raises :class:`ClusterError` with all failures. The preflight checks the rendezvous port.
    """
    others = list(client.hosts.nodes) if len(client.hosts.nodes) > 1 else []

    def ask(node: str, _: Host) -> QuickReport:
        return node_report(client, node, QuickReport, QUICK, *(others if node == client.head else ()))

    reports = client.hosts.each(ask)
    images = {node: state.container.image_id for node, state in client.states.items() if state.container}
    found = list(image_findings(client.cluster.hosts_option, images))
    for node, report in reports.items():
        found += space_findings(client.cluster, node, report)
        found += interface_findings(client.cluster, node, report) if len(reports) > 1 else ()
        found += () if on_cpu else cuda_findings(node, client.cluster.everywhere[node], report)
    found += ssh_findings(client.cluster, reports[client.head].ssh, lambda node: host_key(client, node))
    ClusterError.raise_for(finding.problem for finding in found if finding.severity == "fail")


def node_report(client: NodeClient, node: str, kind: type[R], *arguments: str) -> R:
    """Returns a node's report. Raises :class:`ClusterError` if its image has another protocol version."""
    report = client.ask(node, kind, "node-report", *arguments, timeout=REPORT_TIMEOUT_S)
    if report.protocol != PROTOCOL:
        raise client.other_version(node, f"protocol {report.protocol}, {PROTOCOL} here")
    return report


def host_key(client: NodeClient, node: str) -> str | None:
    """Returns the fingerprint of a node's own host key; None if it does not say."""
    try:
        return client.ask(node, HostKey, "host-key", timeout=REPORT_TIMEOUT_S).fingerprint
    except ClusterError:
        return None
