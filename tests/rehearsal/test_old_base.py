"""A base with a package that is too old for one of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.support import execute, own_name, succeed

BASE = "tridock-rehearsal-base"


@pytest.fixture
def old_base(tmp_path: Path) -> Iterator[str]:
    name = own_name()
    # No other base has this file: what is built on it comes from no cache, and prints what it does.
    remains = "rm -r /usr/local/lib/python3.11/dist-packages/remains.egg-info"  # pip's own check would fail at it
    commands = f"{remains} && PIP_CONSTRAINT= pip install --quiet packaging==23.2 && echo {name} >/etc/rehearsal"
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nRUN {commands}\n")
    succeed("docker", "build", "--quiet", "--tag", name, str(tmp_path))
    yield name
    execute("docker", "image", "rm", "--force", f"{name}:image", name)


def test_the_build_names_the_package_and_who_needs_a_newer_one(old_base: str) -> None:
    keep = {**os.environ, "KEEP_COMPOSE": "1", "BUILDKIT_PROGRESS": "plain"}
    done = execute("tools/build-image.sh", "gpu", old_base, f"{old_base}:image", "", "none", env=keep)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the locked packaging goes in front of the base's 23.2: " in done.stderr
    version = "import packaging, torch; print(packaging.__version__, torch.__version__)"
    shown = succeed("docker", "run", "--rm", f"{old_base}:image", "python", "-c", version)
    assert shown.split()[0] not in ("", "23.2")
    assert shown.split()[1] == "2.11.0+cu130"
