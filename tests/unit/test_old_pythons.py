"""What the user's own program imports runs in that program's Python, from 3.8 on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("tridock.heartbeat", "tridock.node.rank_output")
NEWER = {"slots", "kw_only", "match_args"}  # of dataclass
NEWER_NAMES = {"UTC", "StrEnum", "Self", "file_digest", "ExceptionGroup", "pairwise"}


def imported() -> list[Path]:
    """The files of Tridock that these modules import."""
    script = "import sys\n" + "".join(f"import {name}\n" for name in NAMES)
    script += "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'tridock'), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return [Path(line) for line in done.stdout.splitlines()]


def test_they_are_python_3_8() -> None:
    files = imported()
    assert {path.relative_to(ROOT).as_posix() for path in files} >= {
        "tridock/heartbeat.py", "tridock/contracts/heartbeat.py", "tridock/node/rank_output.py"
    }  # fmt: skip
    for path in files:
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        # Without it, `int | None` is evaluated where the function is defined.
        annotated = any(isinstance(node, ast.arg | ast.AnnAssign) for node in ast.walk(tree))
        assert not annotated or "from __future__ import annotations" in path.read_text(), path
        keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not (keywords & NEWER | names & NEWER_NAMES), path
