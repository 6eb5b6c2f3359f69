"""Which image the nodes run where the settings name none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tridock.cluster.settings import load_cluster
from tridock.errors import ClusterError
from tridock.ops.hosts.facts import HostFacts, HostState
from tridock.ops.image.ensure import wanted_image, with_built_image


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The image of a cluster on a machine whose Docker has these images."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def choose(*images: str, settings: str = "") -> str:
        cases = "".join(f"  */{image} | {image}) echo sha256:1; exit;;\n" for image in images)
        (tmp_path / "docker").write_text(f"#!/bin/sh\nfor last; do :; done\ncase $last in\n{cases}esac\nexit 1\n")
        (tmp_path / "docker").chmod(0o755)
        (tmp_path / "lab").write_text("gpu-1 slots=1\n")
        (tmp_path / "lab.yaml").write_text(settings)
        return with_built_image(load_cluster(tmp_path / "lab")).settings.image

    return choose


def test_the_image_that_was_built_is_the_default(built: Callable[..., str]) -> None:
    assert built("tridock:cpu") == "tridock:cpu"
    assert built("tridock:cpu", "tridock:latest") == "tridock:latest"
    assert built() == "tridock:latest"
    assert built("tridock:cpu", settings="image: tridock:latest") == "tridock:latest"
    assert built("tridock:cpu", settings="image: mine:1\nwrap: true").endswith("/mine:1")


def test_hosts_with_gpus_do_not_get_an_image_that_cannot_use_them(built: Callable[..., str], tmp_path: Path) -> None:
    built("tridock:cpu")
    states = {"gpu-1": HostState(HostFacts(1000, 1000, "/home/ada", 8, False), "sha256:1", None, None)}
    with pytest.raises(ClusterError, match="cannot use the GPUs of these hosts; got gpu-1; run tridock image here"):
        wanted_image(with_built_image(load_cluster(tmp_path / "lab")), states)
    built("tridock:cpu", settings="container: {gpus: none}")
    assert wanted_image(with_built_image(load_cluster(tmp_path / "lab")), states) == "sha256:1"
