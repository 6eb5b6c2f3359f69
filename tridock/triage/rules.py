"""All rules, in the order in which they are tried: what the supervisor saw, what upstream said, and what is left."""

from __future__ import annotations

from typing import Final

from tridock.contracts.events import Cause, Event
from tridock.triage.rule import Rule, regex
from tridock.triage.upstream_rules import UPSTREAM

_SUPERVISOR: Final = "the supervisor (events.jsonl)"

_SEEN: Final = (
    Rule(
        "killed-by-kernel",
        "the memory of {node} ran out, and the kernel killed the rank",
        "give the container or the host more memory, start fewer ranks there, or lower batch.micro_batch_size",
        "the supervisor: oom_kill in memory.events of the node's cgroup",
        causes={Cause.RANK_KILLED_FOR_MEMORY},
        memory=True,
    ),
    Rule(
        "rank-stopped",
        "{who} was stopped by a signal (SIGSTOP) or is held by a debugger",
        "let it go on (kill -CONT) or end the debugger, then launch again; "
        "launch.hang_timeout: 0 lets a debugger hold a rank",
        _SUPERVISOR,
        causes={Cause.RANK_STOPPED},
    ),
    Rule(
        "collective-does-not-end",
        "all ranks wait in a collective that does not end",
        "look whether all of them are in the same one (the stacks stand in logs/rank-<N>.log); NCCL_DEBUG=INFO shows "
        "its connections, and fab check tries the network between the nodes",
        _SUPERVISOR,
        causes={Cause.COLLECTIVE_HUNG},
        waits=True,
        proof="recorded",
    ),
    Rule(
        "rank-hung",
        "{who} does not get on, and the others wait for it",
        "its stacks stand at the end of logs/rank-<N>.log: a file system that does not answer, a lock, or a loop "
        "without end; a step that may take this long needs a larger launch.hang_timeout",
        _SUPERVISOR,
        causes={Cause.RANK_HUNG},
        waits=True,
        proof="recorded",
    ),
    Rule(
        "node-lost",
        "{node} or its network has gone",
        "see that the host is up and reached (fab status, fab check), then launch again with train.load",
        _SUPERVISOR,
        causes={Cause.NODE_SILENT, Cause.SSH_SESSION_LOST},
        proof="recorded",
    ),
    Rule(
        "head-lost",
        "{node} lost the head, which says nothing of the run's end: the head or its network has gone",
        "see that the head is up and reached (fab status, fab check), then launch again with train.load",
        _SUPERVISOR,
        causes={Cause.HEAD_SILENT},
        proof="recorded",
    ),
)

_LAST: Final = (
    Rule(
        "another-rank-has-gone",
        "a rank lost its connection to another that says nothing of itself",
        "look at the logs of the other ranks, and at dmesg on their nodes",
        "Tridock, train/process_group.py; Gloo",
        causes={Cause.PEER_LOST},
        says=regex(r"Connection (?:closed|reset) by peer"),
        last=True,
        waits=True,
    ),
    Rule(
        "killed-for-memory-on-host",
        "the kernel of {node} killed for memory while the run went on",
        "give the host more memory, end what else runs there, start fewer ranks, or lower batch.micro_batch_size",
        "the kernel's log of the node, where it may be read",
        events={Event.RANK_DIED, Event.RUN_FAILED, Event.LAUNCHER_ENDED},
        last=True,
        kernel=True,
        memory=True,
        proof="recorded",
    ),
    Rule(
        "ended-without-a-word",
        "{who} ended without a word: a signal from outside, or from a fault in native code",
        "look at the end of its log, at dmesg on {node}, and for who may have ended it (kill, a batch system's limit)",
        _SUPERVISOR,
        events={Event.RANK_DIED},
        last=True,
    ),
    Rule(
        "launcher-ended",
        "the launcher on the head ended before its ranks",
        "look at the end of logs/launcher.log, and at dmesg on the head",
        _SUPERVISOR,
        events={Event.LAUNCHER_ENDED},
        last=True,
    ),
    Rule(
        "unknown",
        "no rule knows this failure",
        "read the end of the failed rank's log and of logs/launcher.log",
        "nothing",
        last=True,
    ),
)

RULES: Final[tuple[Rule, ...]] = (*_SEEN, *UPSTREAM, *_LAST)
"""The last one fits every failure."""
