"""A command that needs a package of an extra, where only the small installation is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tridock.errors import EXTRAS

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "data demo": ("numpy", "data"),
    "data inspect x": ("numpy", "data"),
    "plan configs/demo.yaml --nodes 1 --plot x.svg": ("matplotlib", "report"),
}


def without_extras(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    absent = "".join(f"sys.modules[{name!r}] = None\n" for names in EXTRAS.values() for name in names)
    program = f"import sys\n{absent}from tridock.cli import main\nsys.exit(main({command.split()!r}))"
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_extra_is_named(command: str, tmp_path: Path) -> None:
    module, extra = COMMANDS[command]
    done = without_extras(command, tmp_path)
    todo = f"pip install 'tridock[{extra}]', or make venv in a checkout"
    assert (done.returncode, done.stderr) == (3, f"{module}: is not installed; {todo}\n")


def test_a_plan_needs_no_extra(tmp_path: Path) -> None:
    done = without_extras("plan configs/demo.yaml --nodes 2 --gpu h200 --search", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_package_of_an_extra_has_its_module_listed() -> None:
    modules = {"pysimdjson": "simdjson", "mlflow-skinny": "mlflow"}
    for extra, listed in EXTRAS.items():
        lines = (ROOT / f"locks/{extra}.in").read_text().splitlines()
        assert sorted(modules.get(line, line) for line in lines if line[0] != "#") == sorted(listed)
