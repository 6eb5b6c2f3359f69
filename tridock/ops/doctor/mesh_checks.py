"""The nodes called by the head over ssh, and looking at each other from there."""

from __future__ import annotations

import secrets
from typing import Final

from tridock.errors import ClusterError
from tridock.ops.doctor.consistency_checks import clock_findings, environment_findings, sharing, sharing_findings
from tridock.ops.doctor.finding import Answers, fail
from tridock.ops.doctor.network_checks import network_findings
from tridock.ops.doctor.node_client import shown_key, verb
from tridock.ops.doctor.report import Report
from tridock.ops.doctor.ssh_checks import path_findings
from tridock.ops.hosts.session import Session

_MEET_S: Final = 40.0


def meet(session: Session, looks: Answers, report: Report) -> None:
    """From the head to every other over ssh, itself included, and from there among each other."""
    cluster = session.cluster
    addresses = [f"{node}={cluster.address_of(node)}" for node in looks]
    try:
        meeting = verb(session, session.head, _MEET_S, "mesh-probe", secrets.token_hex(6), "--", *addresses)
    except ClusterError as error:
        why = "the head cannot call the other nodes"
        report.findings += [fail("ssh", problem, why) for problem in error.problems]
        return
    on_gpus = any(look["accelerator"] != "cpu" and look["gpus"] for look in looks.values())
    report.findings += path_findings(cluster, meeting, shown_key(session))
    report.findings += network_findings(cluster, meeting, on_gpus)
    hellos = {node: said["hello"] for node, said in meeting.items() if "hello" in said}
    if session.head not in hellos:
        return
    report.findings += environment_findings(cluster, {node: hello["environment"] for node, hello in hellos.items()})
    met = {node: said["clock"] for node, said in meeting.items() if "clock" in said}
    clocks = {node: (clock["offset"], clock["error"]) for node, clock in met.items()}
    report.findings += clock_findings(clocks)
    groups = sharing({node: said["look"]["sees"] for node, said in meeting.items() if "look" in said})
    report.findings += sharing_findings(groups)
    report.seen["ssh"] = f"{len(hellos)} nodes answer {session.head}'s ssh as nodes of {cluster.name}"
    report.seen["environment"] = f"{len(hellos[session.head]['environment'])} variables"
    spread = max(clocks.values())[0] - min(clocks.values())[0]
    report.seen["clock"] = f"within {max(spread, 0.001) * 1e3:.0f} ms"
    chosen = {it: hellos[session.head]["network"][it] for it in (("gloo", "nccl") if on_gpus else ("gloo",))}
    used = [f"{it}: {own['name']} {own['address']}" for it, own in chosen.items() if own]
    report.seen["network"] = ", ".join(used) + f" on {session.head}"
    if len(hellos) > 1:
        where = "shared by all" if len(groups) == 1 else "local to each" if len(groups) == len(hellos) else "mixed"
        report.seen["space"] += f"; /workspace/runs is {where}"
