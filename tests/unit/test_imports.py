"""The doors of docs/architecture.md: imports go down only, and heavy libraries stay in their rooms."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import SOURCES, nodes

ROOT = Path(__file__).parents[2]
FILES = frozenset(SOURCES)
pytestmark = pytest.mark.xdist_group("sources")

# Each room and what it may import besides itself. What is not listed here is a new room: it needs a line.
PURE = {
    "errors": set(),
    "command": set(),
    "interrupts": set(),
    "contracts": {"errors", "interrupts"},
    "heartbeat": {"contracts"},
    "project_files": set(),
    "extras": {"errors", "project_files"},
    "yaml_text": {"errors"},
    "strict_yaml": {"errors", "project_files", "yaml_text"},
    "progress": set(),
    "tracker_settings": {"strict_yaml", "contracts"},
    "gpus": {"errors"},
    "base_images": set(),
    "differences": set(),
}
LOW = set(PURE)
ROOMS: dict[str, set[str]] = {
    **PURE,
    "reproduction": LOW,
    "experiment": LOW,
    "cluster": LOW,
    "layout": LOW | {"experiment"},
    "engines": LOW | {"experiment", "layout"},
    "plan": LOW | {"experiment", "cluster", "layout", "engines"},
    "launchers": LOW | {"experiment", "cluster", "layout", "plan", "engines"},
    "remote": LOW | {"cluster"},
    "triage": LOW,
    "ops": LOW
    | {"experiment", "cluster", "layout", "plan", "engines", "launchers", "remote", "triage", "reproduction"},
    "node": LOW,
    "data": LOW | {"experiment"},
    "compat": set(),
    "train": LOW | {"experiment", "layout", "engines", "data", "compat"},
    "trackers": LOW,
    "report": LOW | {"experiment", "layout", "engines", "plan", "reproduction"},
    "bench": LOW | {"experiment", "engines", "plan", "report", "triage"},
    "cli": LOW
    | {"experiment", "cluster", "plan", "ops", "data", "report", "reproduction", "bench", "launchers", "trackers"},
    "fabfile": {"cli"},
}
# The floors of ops, the lowest first, as in docs/architecture.md: a room imports those below it.
FLOORS = (
    {"outgoing", "project", "rank_group", "hosts"},
    {"image"},
    {"nodes"},
    {"checks"},
    {"runs"},
    {"calibrate", "doctor", "slurm", "sync"},
)
HOMES = {
    "torch": {"train", "compat"},
    "deepspeed": {"train", "compat"},
    "megatron": {"train", "compat"},
    "fabric": {"cli"},
    "invoke": {"cli"},
    "paramiko": set(),
    "yaml": {"yaml_text"},
    "tokenizers": {"data"},
    "matplotlib": {"report"},
}


def modules() -> Iterator[tuple[str, Path]]:
    yield "fabfile", ROOT / "fabfile.py"
    for path in sorted((ROOT / "tridock").rglob("*.py")):
        parts = path.relative_to(ROOT / "tridock").with_suffix("").parts
        if parts != ("__init__",):
            yield parts[0], path


def imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "tridock":
                yield from (f"tridock.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_imports_go_down_only() -> None:
    wrong = []
    for room, path in modules():
        assert room in ROOMS, f"{room} is a new room: give it a line in ROOMS and in docs/architecture.md"
        for name in imported(path):
            top, _, rest = name.partition(".")
            if top == "tridock" and rest.partition(".")[0] not in ROOMS[room] | {room, "__version__"}:
                wrong.append(f"{path}: {room} must not import {name}")
            elif top in HOMES and room not in HOMES[top]:
                wrong.append(f"{path}: {top} belongs to {sorted(HOMES[top])}")
    assert wrong == []


def test_ops_imports_go_down_only() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    wrong = []
    for path in sorted((ROOT / "tridock/ops").glob("*/*.py")) + sorted((ROOT / "tridock/ops").glob("[!_]*.py")):
        own = path.relative_to(ROOT / "tridock/ops").with_suffix("").parts[0]
        others = {name.split(".")[2] for name in imported(path) if name.startswith("tridock.ops.")} - {own}
        wrong += [f"{path}: {own} must not import {it}" for it in sorted(others) if floor[it] >= floor[own]]
    assert wrong == []


def imported_files(path: Path) -> Iterator[Path]:
    """The files of Tridock that a file imports, anywhere in it."""
    for node in nodes(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            place = ROOT.joinpath(*name.split("."))
            inside = [place.with_suffix(".py"), place / "__init__.py", place.parent.with_suffix(".py")]
            yield from [it for it in (*inside, place.parent / "__init__.py") if it in FILES and it != path][:1]


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {path: set(imported_files(path)) for path in FILES}
    assert sum(map(len, left.values())) > 1000
    while free := [path for path, others in left.items() if not others & left.keys()]:
        for path in free:
            del left[path]
    assert not left, "each of these imports one that leads back to it"


def test_only_the_tests_that_share_a_process_import_torch() -> None:
    """The other process of `make test-unit` would import it too, which takes longer than most tests together."""
    (folders,) = re.findall(r"^TORCH_TESTS = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    own = [ROOT / folder for folder in folders.split()]
    others = [path for path in (ROOT / "tests/unit").rglob("*.py") if not any(map(path.is_relative_to, own))]
    statement = r"^ *(?:import|from) (?:torch|deepspeed|tridock\.(?:train|compat))\b"
    heavy = re.compile(rf"{statement}|importorskip\(.(?:torch|deepspeed)", re.MULTILINE)
    found = {str(path): heavy.findall(path.read_text()) for path in others}
    assert len(others) > 100
    assert not any(found.values()), found


def test_node_starts_without_heavy_packages() -> None:
    for _, path in (pair for pair in modules() if pair[0] == "node"):
        third_party = {name.partition(".")[0] for name in imported(path)} & {"pydantic", "rich", "yaml", "numpy"}
        assert not third_party, f"{path}: {third_party}"


def test_a_run_on_one_machine_needs_no_package_of_the_operators() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None\n" for name in ("fabric", "invoke", "paramiko"))
    program = f"import sys\n{absent}import tridock.cli, tridock.ops.runs.local_run"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_users_own_program_starts_without_the_planner() -> None:
    """Importing it, or what brings an image or prints a table, would take a tenth of a second of `tridock run`."""
    absent = "".join(f"sys.modules[{f'tridock.{name}'!r}] = None\n" for name in ("plan", "engines", "ops.image.pull"))
    program = f"import sys\n{absent}sys.modules['rich.table'] = None\nimport tridock.cli.run, tridock.ops.runs.launch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_path_of_the_makefiles_test_lists_exists() -> None:
    asked = "include Makefile\nprint-paths:\n\t@echo $(TORCH_TESTS) $(PROCESS_TESTS)\n"
    argv = ["make", "--silent", "--no-print-directory", "-f", "-", "print-paths"]
    env = {"PATH": os.environ["PATH"]}  # without MAKEFLAGS, where make itself runs the tests
    done = subprocess.run(argv, input=asked, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    paths = done.stdout.split()
    assert len(paths) > 10, done.stderr
    assert [path for path in paths if not (ROOT / path).exists()] == []
