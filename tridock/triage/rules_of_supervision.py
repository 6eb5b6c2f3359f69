"""Rules about what the supervisor saw: signals, hangs, lost nodes. ``LEFT`` is asked last."""

from __future__ import annotations

from typing import Final

from tridock.triage.rule import Rule, words

_DIED: Final = frozenset({"rank_died"})
_HUNG: Final = frozenset({"rank_hung"})
_SUPERVISOR: Final = "the supervisor (events.jsonl)"

SUPERVISION: Final = (
    Rule(
        "killed-by-kernel",
        "the memory of {node} ran out, and the kernel killed the rank",
        "give the container or the host more memory, start fewer ranks there, or lower batch.micro_batch_size",
        "the supervisor: oom_kill in memory.events of the node's cgroup",
        says=words("was killed by the kernel, out of memory"),
        events=_DIED,
        memory=True,
    ),
    Rule(
        "rank-stopped",
        "{who} was stopped by a signal (SIGSTOP) or is held by a debugger",
        "let it go on (kill -CONT) or end the debugger, then launch again; "
        "launch.hang_timeout: 0 lets a debugger hold a rank",
        _SUPERVISOR,
        says=words("is stopped"),
        events=_HUNG,
    ),
    Rule(
        "collective-does-not-end",
        "all ranks wait in a collective that does not end",
        "look whether all of them are in the same one (the stacks stand in logs/rank-<N>.log); NCCL_DEBUG=INFO shows "
        "its connections, and fab check tries the network between the nodes",
        _SUPERVISOR,
        says=words("a collective that does not end"),
        events=_HUNG,
        waits=True,
        proof="recorded",
    ),
    Rule(
        "rank-hung",
        "{who} does not get on, and the others wait for it",
        "its stacks stand at the end of logs/rank-<N>.log: a file system that does not answer, a lock, or a loop "
        "without end; a step that may take this long needs a larger launch.hang_timeout",
        _SUPERVISOR,
        says=words("hangs"),
        events=_HUNG,
        waits=True,
        proof="recorded",
    ),
    Rule(
        "node-lost",
        "{node} or its network has gone",
        "see that the host is up and reached (fab status, fab check), then launch again with train.load",
        _SUPERVISOR,
        says=words("has not answered|dropped the ssh session"),
        events=frozenset({"node_lost"}),
        proof="recorded",
    ),
    Rule(
        "head-lost",
        "{node} lost the head, which says nothing of the run's end: the head or its network has gone",
        "see that the head is up and reached (fab status, fab check), then launch again with train.load",
        _SUPERVISOR,
        says=words("heard nothing from the head"),
        events=frozenset({"head_lost"}),
        proof="recorded",
    ),
)

LEFT: Final = (
    Rule(
        "another-rank-has-gone",
        "a rank lost its connection to another that says nothing of itself",
        "look at the logs of the other ranks, and at dmesg on their nodes",
        "Tridock, train/process_group.py; Gloo",
        says=words(r"another rank has gone|Connection (?:closed|reset) by peer"),
        late=True,
        waits=True,
    ),
    Rule(
        "killed-for-memory-on-host",
        "the kernel of {node} killed for memory while the run went on",
        "give the host more memory, end what else runs there, start fewer ranks, or lower batch.micro_batch_size",
        "the kernel's log of the node, where it may be read",
        events=frozenset({"rank_died", "run_failed", "launcher_ended"}),
        kernel=True,
        memory=True,
        proof="recorded",
    ),
    Rule(
        "ended-without-a-word",
        "{who} ended without a word: a signal from outside, or from a fault in native code",
        "look at the end of its log, at dmesg on {node}, and for who may have ended it (kill, a batch system's limit)",
        _SUPERVISOR,
        events=_DIED,
    ),
    Rule(
        "launcher-ended",
        "the launcher on the head ended before its ranks",
        "look at the end of logs/launcher.log, and at dmesg on the head",
        _SUPERVISOR,
        events=frozenset({"launcher_ended"}),
    ),
    Rule(
        "unknown",
        "no rule knows this failure",
        "read the end of the failed rank's log and of logs/launcher.log",
        "nothing",
    ),
)
