"""The code in the image: an edit makes a layer of what it changed, on that of an earlier build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def place(source: Path, target: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/image-code.py", source, target], check=True, timeout=60)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def state(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ctime_ns for path in folder.rglob("*") if path.is_file()}


def test_what_is_equal_is_left_alone(tmp_path: Path) -> None:
    """A layer has the files that were written or removed."""
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, a="1", b__c="2", b__gone="3", other__d="4", e="5")
    (source / "b/data.yaml").write_text("x: 1\n")
    place(source, target)
    names = {"a", "b/c", "b/gone", "other/d", "e"}
    before = state(target)
    assert {name for name in before if not name.endswith(".pyc")} == {"b/data.yaml", *(f"{name}.py" for name in names)}
    assert sum(name.endswith(".pyc") for name in before) == len(names)

    write(source, b__c="2\n# edited", new__f="6")
    (source / "e.py").chmod(0o755)
    (source / "b/gone.py").unlink()
    shutil.rmtree(source / "other")
    os.utime(source / "a.py")
    place(source, target)
    after = state(target)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    cache = f"{sys.implementation.cache_tag}.pyc"
    assert changed == {
        "b/c.py", f"b/__pycache__/c.{cache}", "new/f.py", f"new/__pycache__/f.{cache}", "e.py",
        f"__pycache__/e.{cache}",
        "b/gone.py", f"b/__pycache__/gone.{cache}", "other/d.py", f"other/__pycache__/d.{cache}",
    }  # fmt: skip
    there = {name for name in after if not name.endswith(".pyc")}
    assert {name: (target / name).read_bytes() for name in there} == {
        name: (source / name).read_bytes() for name in state(source)
    }
    assert not (target / "other").exists()
    assert (target / "e.py").stat().st_mode == (source / "e.py").stat().st_mode


def test_a_build_without_the_script_has_no_earlier_code(tmp_path: Path) -> None:
    """docker compose builds so."""
    place(tmp_path / "none", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_folder_and_a_file_change_places(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, a__b="1", c="2")
    place(source, target)
    shutil.rmtree(source / "a")
    (source / "a").write_text("a file")
    (source / "c.py").unlink()
    (source / "c.py").mkdir()
    place(source, target)
    assert (target / "a").read_text() == "a file"
    assert list((target / "c.py").iterdir()) == []


def test_a_build_keeps_the_earlier_code_until_a_tenth_of_it_has_changed(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/build-image.sh", tmp_path / "tools")
    program = tmp_path / "programs/docker"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    code, kept = tmp_path / "tridock", tmp_path / "image-code/tridock"
    write(code, __init__='__version__ = "1"\n', **{f"m{number}": str(number) for number in range(20)})

    def build() -> dict[str, str]:
        environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        subprocess.run(["tools/build-image.sh", "wrap", "base:1", "own:1"], cwd=tmp_path, env=environ, check=True,
                       stdout=subprocess.DEVNULL, timeout=60)  # fmt: skip
        return {path.name: path.read_text() for path in kept.iterdir()}

    first = build()
    assert first == {path.name: path.read_text() for path in code.iterdir()}
    (code / "__pycache__").mkdir()
    write(code, m1="edited", new="new")
    assert build() == first
    (code / "m2.py").unlink()
    shutil.rmtree(code / "__pycache__")
    assert build() == {path.name: path.read_text() for path in code.iterdir()}
