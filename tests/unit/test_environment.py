"""The environment's names stand in one module; scripts and Compose files, which cannot import it, use the same."""

from __future__ import annotations

import re
from pathlib import Path

from tridock.contracts import environment

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bTRIDOCK_[A-Z_]*[A-Z]\b")
KNOWN = {value for value in vars(environment).values() if isinstance(value, str) and NAME.fullmatch(value)}


def test_python_code_has_the_names_from_the_module() -> None:
    literal = re.compile(rf"""["']{NAME.pattern}["']""")
    paths = [path for path in (ROOT / "tridock").rglob("*.py") if path.name != "environment.py"]
    assert {str(path): found for path in paths if (found := literal.findall(path.read_text()))} == {}


def test_scripts_and_compose_files_use_known_names() -> None:
    paths = [*(ROOT / "entrypoint").iterdir(), *ROOT.glob("docker-compose*.yml"), ROOT / "Dockerfile"]
    used = {name for path in paths if path.is_file() for name in NAME.findall(path.read_text())}
    assert used <= KNOWN


def test_the_entrypoint_keeps_a_runs_variables_out_of_the_nodes_environment() -> None:
    text = (ROOT / "entrypoint/entrypoint.sh").read_text()
    (excluded,) = re.findall(r"^ +SSH_\* \| (.+)\) return 1 ;;$", text, re.MULTILINE)
    assert tuple(excluded.split(" | ")) == environment.OF_A_RUN
