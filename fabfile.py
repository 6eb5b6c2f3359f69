"""Fabric's tasks: `fab launch --hosts hostfile` is `tridock launch --hosts hostfile`. `fab --list` shows them."""

import os
import sys
from pathlib import Path

try:
    from tridock.cli.fab import collection
except ModuleNotFoundError as missing:  # a Fabric of another Python than .venv's
    fab = Path(__file__).resolve().parent / ".venv" / "bin" / "fab"
    if not fab.exists():
        sys.exit(f"fab: {missing}; run `make image` or `make venv-operator` in {fab.parents[2]}, then ./fab")
    os.execv(fab, [str(fab), *sys.argv[1:]])  # noqa: S606

namespace = collection()
