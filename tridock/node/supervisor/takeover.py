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
from tridock.node.supervisor import process

_LOOK_S: Final = 1.0
_STAGGER_S: Final = 1.5
_LATEST_S: Final = 9.0


def stand_in(folder: Path, node: str) -> None:
    """Takes over the run once it has no supervisor.

    Returns when a supervisor is back, when the run has ended, or when this node may not take over.
    """
    supervision = Supervision.from_json((folder / run_folder.SUPERVISION).read_text())
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


def _is_over(folder: Path) -> bool:
    return exit_code_of(folder) is not None or (folder / run_folder.STOPPED).exists()


def _led_by(node: str, supervision: Supervision) -> Supervision:
    others = tuple(name for name in supervision.watched if name != node)
    return replace(supervision, head=node, remote=others)
