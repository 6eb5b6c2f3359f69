"""``python -m tridock.cli``: the command ``tridock``."""

import sys

from tridock.cli.interrupts import end_at_once


def run() -> None:
    end_at_once()
    from tridock.cli.program import main

    sys.exit(main())


if __name__ == "__main__":
    run()
