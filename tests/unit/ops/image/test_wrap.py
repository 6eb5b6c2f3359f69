"""When Tridock's layer is built anew on an image of yours."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tridock import project_files
from tridock.cluster.settings import load_cluster
from tridock.ops import project
from tridock.ops.image.wrap import ensure_wrapped

ROOT = Path(__file__).parents[4]
RECIPE = (ROOT / "Dockerfile.wrap").read_text()
READ = {
    "Dockerfile.wrap",
    *re.findall(r"source=([\w./-]+)", RECIPE),
    *re.findall(r"^COPY (?!--)(\S+) ", RECIPE, re.MULTILINE),
}
"""What the image is built from."""
DOCKER = """
case "$*" in
    *'{{.Id}}'*) echo sha256:1 ;;
    *tridock.base*) sed -n 's/^tridock.base=//p' BUILT ;;
    *tridock.code*) sed -n 's/^tridock.code=//p' BUILT ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what an image is built from, with a build that only notes the labels."""
    copy = tmp_path / "checkout"
    for name in ("Dockerfile", "Dockerfile.wrap", "locks/train-cpu.txt", "locks/docs.txt"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in ("entrypoint", "tools", "tridock"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tools/build-image.sh").write_text('#!/bin/sh\necho built >>../builds\necho "$LABELS" >../built\n')
    for module in (project_files, project):
        monkeypatch.setattr(module, "ROOT", copy)
    monkeypatch.setattr(project_files, "_PACKAGE", copy / "tridock")
    return copy


def test_the_layer_is_built_anew_for_all_that_it_is_made_of(
    checkout: Path, tmp_path: Path, docker: Callable[[str], None]
) -> None:
    docker(DOCKER.replace("BUILT", str(tmp_path / "built")))
    (tmp_path / "lab").write_text("gpu-1 slots=1\n")
    (tmp_path / "lab.yaml").write_text("image: mine:1\nwrap: true\n")
    cluster = load_cluster(tmp_path / "lab")

    def builds() -> int:
        ensure_wrapped(cluster)
        return (tmp_path / "builds").read_text().count("built")

    assert builds() == 1
    assert "locks/train-cpu.txt" in READ
    for number, part in enumerate(sorted(READ), 1):
        path = checkout / part
        with (path if path.is_file() else path / "more").open("a") as file:
            file.write("# more\n")
        assert (builds(), builds()) == (number + 1, number + 1), part
    (checkout / "locks/docs.txt").write_text("other")  # of the documentation's tools
    assert builds() == len(READ) + 1
