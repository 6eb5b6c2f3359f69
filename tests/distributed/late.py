"""A node that answers late, and a supervisor that never takes it for lost.

``python -m tests.distributed.late tridock.node …`` is ``python -m tridock.node …`` for which no silence is too long.
``python -m tests.distributed.late MARK ARGV …`` runs an agent for such a supervisor, and leaves ``MARK`` when it begins
to be late: from its first answer to an order to stop until the third such order, it says nothing.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

from tests.patience import WORK_S
from tridock.contracts import rank_status

LATE_UNTIL = 3
"""The order to stop that a supervisor gives a node once it has found it late."""


def answer_late(mark: Path, argv: list[str]) -> int:
    agent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin is not None
    assert agent.stdout is not None
    orders, asked_again = agent.stdin, threading.Event()

    def pass_orders() -> None:
        stops = 0
        for order in sys.stdin.buffer:
            stops += order.startswith(b"stop ")
            if stops == LATE_UNTIL:
                asked_again.set()
            orders.write(order)
            orders.flush()
        asked_again.set()
        orders.close()

    threading.Thread(target=pass_orders, daemon=True).start()
    for message in agent.stdout:
        if b'"stopped": {' in message and not mark.exists():
            mark.touch()
            asked_again.wait(WORK_S)
        os.write(1, message)
    return agent.wait()


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "tridock.node":
        rank_status.NODE_SILENCE_S = WORK_S  # type: ignore[misc]  before other modules import it
        sys.argv = [first, *rest]
        runpy.run_module(first, run_name="__main__")
    else:
        sys.exit(answer_late(Path(first), rest))
