"""Takeover: a node that has lost the head waits until the head's lease expires, then supervises the run itself.

All nodes of the run do that, each a little later than the previous one; one gets the lease. The head is among them, as
it may have lost only its supervisor.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.lease import EXPIRY_S, HeldLease, LeaseWatch
from tridock.contracts.run_state import exit_code_of
from tridock.contracts.supervision import Supervision
from tridock.node.agent.node_agent import is_replaced
from tridock.node.agent.replica import adopt, copy_of
from tridock.node.supervisor import process
from tridock.node.supervisor.voted_lease import VotedLease, close, survey, voters_of

_LOOK_S: Final = 1.0
_STAGGER_S: Final = 1.5
_LATEST_S: Final = 9.0
_GIVE_UP_S: Final = 600.0
"""Seconds after which a run whose nodes find no majority stays lost."""


def stand_in(folder: Path, node: str) -> None:
    """Takes over the run once it has no supervisor.

    Returns when a supervisor is back, when the run has ended, or when this node may not take over.
    """
    supervision = Supervision.from_json((folder / run_folder.SUPERVISION).read_text())
    if supervision.voters:
        if supervision.may_be_taken_over and node in (supervision.head, *supervision.replicas):
            _stand_for_election(folder, node, supervision)
        return
    watch = LeaseWatch(folder)
    # Without a lease the folder is this node's alone, and the head's records are not here.
    if not supervision.may_be_taken_over or not watch.token:
        return
    patience = EXPIRY_S + min(_LATEST_S, _STAGGER_S * supervision.watched.index(node))
    while not _is_over(folder) and not watch.renewed and not is_replaced(folder, node):
        if watch.look() > patience and (taken := HeldLease.take(folder, watch.token, node)) is not None:
            process.take_over(folder, _led_by(node, supervision), taken, supervision.head)
            return
        time.sleep(_LOOK_S)


def _stand_for_election(folder: Path, node: str, supervision: Supervision) -> None:
    """Takes over the run once a majority of the voters knows of no supervisor, unless another node has a newer copy."""
    led = _led_by(node, supervision)
    voters = voters_of(folder, led)
    deadline = time.monotonic() + _GIVE_UP_S
    time.sleep(min(_LATEST_S, _STAGGER_S * supervision.watched.index(node)))
    while not _is_over(folder) and not is_replaced(folder, node) and time.monotonic() < deadline:
        answers = survey(voters, node)
        majority = len(answers) > len(led.voters) / 2
        if majority and max(answers.values(), key=lambda answer: answer.token).is_over:
            break
        if majority and sum(answer.left_s == 0 for answer in answers.values()) > len(led.voters) / 2:
            token, copied = 1 + max(answer.token for answer in answers.values()), copy_of(folder)
            lease = VotedLease(folder, led, token, copied, voters)
            if lease.acquire():
                adopt(folder, copied)
                lease.pause()
                process.take_over(folder, led, lease, supervision.head)
                return
        time.sleep(_LOOK_S)
    close(voters)


def _is_over(folder: Path) -> bool:
    return exit_code_of(folder) is not None or (folder / run_folder.STOPPED).exists()


def _led_by(node: str, supervision: Supervision) -> Supervision:
    others = tuple(name for name in supervision.watched if name != node)
    return replace(supervision, head=node, remote=others)
