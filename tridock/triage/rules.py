"""All rules, in the order in which they are tried: what the supervisor saw, what upstream printed, and the rest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tridock.contracts.events import Cause, Event
from tridock.strict_yaml import parse_yaml, read_text
from tridock.triage.rule import Rule, regex

_SUPERVISOR: Final = "the supervisor (events.jsonl)"

_SEEN: Final = (
    Rule(
        "oom-killed",
        "{node} ran out of memory, and the kernel killed the rank",
        "give the container or the host more memory, start fewer ranks there, or lower batch.micro_batch_size",
        "the supervisor: oom_kill in memory.events of the node's cgroup",
        causes={Cause.RANK_KILLED_FOR_MEMORY},
        memory=True,
    ),
    Rule(
        "rank-stopped",
        "{who} was stopped by a signal (SIGSTOP) or is held by a debugger",
        "continue it (kill -CONT) or end the debugger, then launch again; "
        "launch.hang_timeout: 0 lets a debugger hold a rank",
        _SUPERVISOR,
        causes={Cause.RANK_STOPPED},
    ),
    Rule(
        "collective-hang",
        "all ranks wait in a collective that does not complete",
        "compare the stacks in logs/rank-<N>.log: all ranks must be in the same one; NCCL_DEBUG=INFO shows its "
        "connections, and fab check tests the network between the nodes",
        _SUPERVISOR,
        causes={Cause.COLLECTIVE_HUNG},
        waits=True,
        proof="recorded",
    ),
    Rule(
        "rank-hung",
        "{who} makes no progress, and the others wait for it",
        "read its stacks at the end of logs/rank-<N>.log: a file system that does not answer, a lock, or an endless "
        "loop; a step that takes this long needs a larger launch.hang_timeout",
        _SUPERVISOR,
        causes={Cause.RANK_HUNG},
        waits=True,
        proof="recorded",
    ),
    Rule(
        "node-lost",
        "{node} or its network is lost",
        "check that the host is up and reachable (fab status, fab check), then launch again with train.load",
        _SUPERVISOR,
        causes={Cause.NODE_SILENT, Cause.SSH_SESSION_LOST},
        proof="recorded",
    ),
    Rule(
        "head-lost",
        "{node} lost the head, and no exit code is known: the head or its network is lost",
        "check that the head is up and reachable (fab status, fab check), then launch again with train.load",
        _SUPERVISOR,
        causes={Cause.HEAD_SILENT},
        proof="recorded",
    ),
)

_LAST: Final = (
    Rule(
        "peer-lost",
        "a rank lost its connection to another one, which recorded no failure",
        "read the logs of the other ranks, and dmesg on their nodes; if none ended, test the network: fab check",
        "Tridock, train/rank/collective_errors.py; Gloo; NCCL",
        causes={Cause.PEER_LOST},
        says=regex(r"Connection (?:closed|reset) by peer|remote process exited or there was a network error"),
        last=True,
        waits=True,
    ),
    Rule(
        "oom-killed-on-host",
        "the kernel of {node} killed a process for memory during the run",
        "give the host more memory, stop other programs there, start fewer ranks, or lower batch.micro_batch_size",
        "the kernel's log of the node, if it can be read",
        events={Event.RANK_DIED, Event.RUN_FAILED, Event.LAUNCHER_ENDED},
        last=True,
        kernel=True,
        memory=True,
        proof="recorded",
    ),
    Rule(
        "exited-without-message",
        "{who} exited without a message: a signal from outside, or a fault in native code",
        "read the end of its log and dmesg on {node}; find what could have killed it (kill, a batch system's limit)",
        _SUPERVISOR,
        events={Event.RANK_DIED},
        last=True,
    ),
    Rule(
        "launcher-ended",
        "the launcher on the head exited before its ranks",
        "read the end of logs/launcher.log, and dmesg on the head",
        _SUPERVISOR,
        events={Event.LAUNCHER_ENDED},
        last=True,
    ),
    Rule(
        "unknown",
        "no rule matches this failure",
        "read the end of the failed rank's log and of logs/launcher.log",
        "nothing",
        last=True,
    ),
)


def _upstream() -> Iterator[Rule]:
    """The rules of ``upstream_rules.yaml``."""
    path = Path(__file__).with_name("upstream_rules.yaml")
    for name, fields in parse_yaml(read_text(path, "the rules of triage"), str(path)).items():
        says, causes = fields.pop("says", None), frozenset(map(Cause, fields.pop("causes", ())))
        pattern = None if says is None else regex("|".join(says))
        yield Rule(name, **fields, causes=causes, says=pattern)


RULES: Final[tuple[Rule, ...]] = (*_SEEN, *_upstream(), *_LAST)
"""The last one fits every failure."""
