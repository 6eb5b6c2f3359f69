"""Heartbeats for your own program under ``tridock run``: report after each step that the rank makes progress.

::

    from tridock import heartbeat

    heartbeat.beat(iteration)

With heartbeats the supervisor can distinguish a rank that hangs from one that waits for the others, and can name the
iteration after which a rank died. Outside a run, the call does nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from tridock.contracts import environment
from tridock.contracts import heartbeat as _heartbeat

_started = False


def beat(iteration: int) -> None:
    """Records that this rank (``RANK``) has finished the iteration. Takes microseconds."""
    global _started  # one process is one rank
    folder, rank = os.environ.get(environment.RUN_FOLDER), os.environ.get("RANK", "")
    if not folder or not rank.isdecimal():
        return
    if not _started:
        _heartbeat.start(Path(folder), int(rank))
        _started = True
    _heartbeat.beat(_heartbeat.TRAIN, iteration)
