"""A command that needs a package of an extra, where only the small installation is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tridock import extras
from tridock.extras import EXTRAS, install_command

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "data demo": "numpy",
    "data inspect x": "numpy",
    "plan configs/demo.yaml --nodes 1 --plot x.svg": "matplotlib",
}
METADATA = """Metadata-Version: 2.4
Name: tridock
Version: 1
Requires-Dist: pyyaml
Requires-Dist: gigatoken; extra == 'data'
Requires-Dist: matplotlib; extra == 'report'
Requires-Dist: numpy>=2; (python_version > '3') and extra == "data"
"""


def without_extras(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    absent = "".join(f"sys.modules[{name!r}] = None\n" for names in EXTRAS.values() for name in names)
    program = f"import sys\n{absent}from tridock.cli import main\nsys.exit(main({command.split()!r}))"
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_way_to_install_it_is_named(command: str, tmp_path: Path) -> None:
    done = without_extras(command, tmp_path)
    todo = shlex.join(("make", "-C", str(ROOT), "venv"))
    assert (done.returncode, done.stderr) == (3, f"{COMMANDS[command]}: is not installed; {todo}\n")


def test_a_plan_needs_no_extra(tmp_path: Path) -> None:
    done = without_extras("plan configs/demo.yaml --nodes 2 --gpu h200 --search", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_package_of_an_extra_has_its_module_listed() -> None:
    modules = {"pysimdjson": "simdjson", "mlflow-skinny": "mlflow"}
    for extra, listed in EXTRAS.items():
        if extra == "train":  # not all of its packages are optional
            continue
        lines = (ROOT / f"locks/{extra}.in").read_text().splitlines()
        names = [line.partition(">=")[0] for line in lines if line[0] != "#"]
        assert sorted(modules.get(name, name) for name in names) == sorted(listed)


# ---- installations -------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation from a wheel in a folder with a space: as pip leaves it, in a virtual environment with pip."""
    folder, wheel = tmp_path / "tridock-1.dist-info", tmp_path / "my dist/tridock-1-py3-none-any.whl"
    for path in (folder, wheel.parent):
        path.mkdir()
    wheel.touch()
    (folder / "METADATA").write_text(METADATA)
    (folder / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda _: metadata.PathDistribution(folder))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name == "pip" else None)
    return wheel


def test_a_wheel_is_named_by_its_file(installed: Path) -> None:
    assert install_command("numpy") == f"/env/bin/python -m pip install '{installed}[data]'"
    assert install_command("torch") == f"/env/bin/python -m pip install '{installed}[train]'"


def test_a_tool_of_uv_keeps_the_extras_that_it_has(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(sys.prefix) / "uv-receipt.toml").touch()
    assert install_command("numpy") == f"uv tool install '{installed}[data]'"
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name == "matplotlib" else None)
    assert install_command("numpy") == f"uv tool install '{installed}[report,data]'"


@pytest.mark.parametrize("source", ["gone", "https://mirror.example/x.whl", ""])
def test_without_the_wheel_the_libraries_are_named(
    source: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.unlink()
    record = Path(sys.prefix) / "tridock-1.dist-info/direct_url.json"
    if source == "":
        record.unlink()
    elif source != "gone":
        record.write_text(json.dumps({"url": source, "archive_info": {}}))
    assert install_command("numpy") == "/env/bin/python -m pip install gigatoken 'numpy>=2'"
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    assert install_command("numpy") == "uv pip install --python /env/bin/python gigatoken 'numpy>=2'"


def test_a_checkout_has_make_and_the_image_its_build(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_distribution(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", no_distribution)
    assert install_command("wandb") == "make image TRACKERS=yes"
    assert install_command("pyarrow") == "make image"
    (extras.ROOT / "Makefile").touch()
    assert install_command("apprise") == f"make -C {shlex.quote(str(extras.ROOT))} trackers"
    assert install_command("torch") == f"make -C {shlex.quote(str(extras.ROOT))} venv"
