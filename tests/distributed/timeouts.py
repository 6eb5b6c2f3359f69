"""One rank of an engine that prints, before it leaves, the timeouts of all its process groups in seconds.

``python -m tests.distributed.timeouts MODULE all --run-folder …``: MODULE is the engine's program.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch
import torch.distributed as dist

from tridock.train.rank import process_group
from tridock.train.rank.run import end

MARK = "timeouts: "


def main() -> int:
    """Takes two arguments, and leaves the rest to the engine's program."""
    _, module, _, *arguments = sys.argv
    sys.argv = [module, *arguments]
    leave = process_group.leave

    def tell() -> None:
        groups = dist.distributed_c10d._world.pg_map
        found = [it._get_backend(torch.device("cpu")).options._timeout.total_seconds() for it in groups]
        print(MARK + json.dumps(found), flush=True)
        leave()

    process_group.leave = tell
    code: int = importlib.import_module(module).main()
    return code


if __name__ == "__main__":
    end(main())
