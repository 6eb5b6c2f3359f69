"""``python -m tridock.cli``: the command ``tridock``."""

import atexit
import gc
import os
import sys

from tridock.cli.interrupts import end_at_once


def run() -> None:
    end_at_once()
    # A short command allocates little that becomes garbage: every 700 objects is too often (a tenth of the start).
    gc.set_threshold(20_000)
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first to be registered runs last
    from tridock.cli.program import main

    codes.append(main())
    sys.exit(codes[0])


def _leave(codes: list[int]) -> None:
    """Ends the process without taking Python's modules and a thread per connection apart, which takes longer than many
    a command. Does nothing if the command has not returned."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    run()
