"""An image of three small layers, and a stand-in for Docker."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.ops.image.three_layers import CONFIG, LAYERS
from tridock.ops.image.archive import ImageParts, digest_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "layers"
    made.mkdir()
    return made


@pytest.fixture
def parts(folder: Path) -> ImageParts:
    """The image with all its layers in the folder."""
    digests = []
    for content in LAYERS:
        packed = gzip.compress(content, mtime=0)
        digests.append({"digest": digest_of(packed), "size": len(packed)})
        (folder / digest_of(packed)).write_bytes(packed)
    manifest = {"mediaType": "m", "config": {"digest": digest_of(CONFIG)}, "layers": digests}
    return ImageParts(CONFIG, json.dumps(manifest).encode(), folder)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of `docker`."""

    def install(script: str) -> None:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return install
