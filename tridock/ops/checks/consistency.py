"""Checks of what must be equal on all nodes: image, code, environment, clock, workspace. Pure."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from tridock.cluster.settings import Cluster
from tridock.contracts.mesh_answers import Clock
from tridock.contracts.run_folder import CODE, MEGATRON
from tridock.errors import Problem
from tridock.ops.checks.finding import UP, Finding, Reports, fail, warn

CLOCK_WARN_S: Final = 1.0
CLOCK_FAIL_S: Final = 30.0
_LISTED: Final = 6


def image_findings(hosts: str, images: Mapping[str, str]) -> Iterator[Finding]:
    """``images`` is the id of the image that each node runs, the head's first."""
    head, *others = images
    for node in others:
        if images[node] != images[head]:
            got = f"{images[node][:19]}, {images[head][:19]} on {head}"
            problem = Problem(node, "runs a different image than the head", got, f"run tridock up {hosts}")
            yield fail("image", problem, "other versions of torch or NCCL do not understand each other", UP)


def code_findings(hosts: str, reports: Reports) -> Iterator[Finding]:
    """Tridock's own code and the patched Megatron-LM by their hashes."""
    head = next(iter(reports))
    for node, report in reports.items():
        own, expected = report.code, reports[head].code
        for path, here, there in ((CODE, own.tridock, expected.tridock), (MEGATRON, own.megatron, expected.megatron)):
            if here != there:
                got = f"{_short(here)}, {_short(there)} on {head}"
                todo = f"recreate its container: tridock down, then tridock up {hosts}"
                problem = Problem(node, f"has different code in {path} than the head", got, todo)
                yield fail("image", problem, "ranks that run other code disagree in the middle of a step")


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def environment_findings(cluster: Cluster, environments: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """The environments of the nodes' ssh sessions; names that the settings set for single nodes may differ."""
    meant = {name for node in cluster.settings.nodes.values() for name in node.env}
    head, *others = environments
    for node in others:
        here, there = environments[node], environments[head]
        names = [name for name in sorted({*here, *there} - meant) if here.get(name) != there.get(name)]
        if names:
            got = "; ".join(_difference(name, here.get(name), there.get(name), head) for name in names[:_LISTED])
            got += f"; and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            todo = "set them for all nodes (env in the settings), then tridock up"
            problem = Problem(node, "its environment differs from the head's", got, todo)
            yield fail("environment", problem, "ranks that are set up differently hang or disagree", UP)


def _difference(name: str, here: str | None, there: str | None, head: str) -> str:
    if here is None:
        return f"{name} is not set, {there} on {head}"
    return f"{name}={here}, {'not set' if there is None else there} on {head}"


def clock_findings(clocks: Mapping[str, Clock]) -> Iterator[Finding]:
    """Yields clocks that differ. Of three or more the median is the reference, so a wrong clock on the head shows."""
    if len(clocks) < 2:
        return
    offsets = [clock.offset for clock in clocks.values()]
    right = statistics.median(offsets) if len(clocks) > 2 else offsets[0]
    for node, clock in clocks.items():
        skew = clock.offset - right
        certain = abs(skew) - clock.error
        if certain > CLOCK_WARN_S:
            direction = "ahead" if skew > 0 else "behind"
            todo = "set it by NTP there (timedatectl set-ntp true)"
            problem = Problem(node, f"its clock is {direction} of the others'", f"{abs(skew):.1f} s", todo)
            why = "the first failure of a run is found by time; files seem older or newer than they are"
            yield (fail if certain > CLOCK_FAIL_S else warn)("clock", problem, why)


def sharing(folders: Mapping[str, str]) -> list[list[str]]:
    """Groups the nodes that share one folder, by its identity; a node without one is alone."""
    groups: dict[str, list[str]] = {}
    for node, identity in folders.items():
        groups.setdefault(identity or node, []).append(node)
    return list(groups.values())


def sharing_findings(groups: list[list[str]]) -> Iterator[Finding]:
    """Checks that all nodes or none share /workspace/runs; if only some do, a mount is probably missing."""
    if len(groups) > 1 and (shared := [group for group in groups if len(group) > 1]):
        most = max(shared, key=len)
        for group in groups:
            if group is not most:
                got = f"{', '.join(group)} apart from {', '.join(most)}"
                todo = "mount the shared folder there too, or make them all local (workdir in the settings)"
                problem = Problem(group[0], "does not share the others' /workspace/runs", got, todo)
                yield warn("space", problem, "checkpoints that ranks write together would lie in two places")
