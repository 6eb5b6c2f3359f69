"""Fabric's tasks: `fab launch --hosts hostfile` is `tridock launch --hosts hostfile`. `fab --list` shows them."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

PROGRAM = "tridock.cli.fab"

# Fabric's own program, maybe of a Python without our packages, hands over to ours.
if getattr(sys.modules["__main__"].__spec__, "name", None) != PROGRAM:
    folder = Path(__file__).resolve().parent
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        missing = [name for name in ("tridock", "pydantic", "rich", "yaml") if find_spec(name) is None]
        if missing:
            todo = f"run `make image` or `make venv-operator` in {folder}, then ./fab"
            print(
                f"fab: Python packages are missing; got no {', '.join(missing)} in {sys.prefix}; {todo}",
                file=sys.stderr,
            )
            sys.exit(3)
        python = Path(sys.executable)
    os.execv(python, [str(python), "-m", PROGRAM, *sys.argv[1:]])  # noqa: S606

from tridock.cli.fab import collection  # noqa: E402

namespace = collection()
