"""Who pulls the base image, and what is said of those that cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tridock.errors import ClusterError
from tridock.ops.hosts.session import Session
from tridock.ops.image import send
from tridock.ops.image.registries import Base
from tridock.ops.image.transfer import Inventory

LAYERS = ("a", "b", "c")
STOCKS = {
    "empty": Inventory({}, "", {}, None, None),
    "part": Inventory({"1": ("a",)}, "", {}, None, None),
    "based": Inventory({"1": ("a", "b", "x")}, "", {}, None, None),
    "whole": Inventory({}, "its docker info names no storage driver", {}, None, None),
}


def pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, base: Base | None, failed: Mapping[str, str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The nodes that pulled the base, and those that were asked to."""
    (tmp_path / "lab").write_text("".join(f"{node} slots=1\n" for node in STOCKS))
    (tmp_path / "lab.yaml").write_text(f"image_base: {policy}\n")
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(send, "base_of", lambda _: base)
    monkeypatch.setattr(send, "pull", lambda _session, _reference, nodes: asked.append(nodes) or failed)
    return send._pull_base(Session.open(tmp_path / "lab"), LAYERS, STOCKS), asked


BASE = Base("nvcr.io/nvidia/pytorch@sha256:1", 2)


def test_hosts_that_lack_the_base_pull_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pulled(tmp_path, monkeypatch, "auto", BASE, {"part": "no route to host"}) == (
        ("empty",), [("empty", "part")],
    )  # fmt: skip
    assert capsys.readouterr().err == (
        "empty, part: docker pull nvcr.io/nvidia/pytorch@sha256:1\n"
        "part: gets the base image from here, it cannot pull it: no route to host\n"
    )


@pytest.mark.parametrize(("policy", "base"), [("send", BASE), ("auto", None)])
def test_nobody_pulls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, base: Base | None) -> None:
    assert pulled(tmp_path, monkeypatch, policy, base, {}) == ((), [])


def test_where_the_base_must_be_pulled_it_is_never_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError) as caught:
        pulled(tmp_path, monkeypatch, "pull", BASE, {"part": "no route to host"})
    assert str(caught.value) == (
        "part: cannot pull the base image; got no route to host; "
        "make docker pull nvcr.io/nvidia/pytorch@sha256:1 work there, or set image_base: auto"
    )
    with pytest.raises(ClusterError) as caught:
        pulled(tmp_path, monkeypatch, "pull", None, {})
    assert str(caught.value) == (
        "image_base: pull: the local Docker engine has no base image from a registry; "
        "docker pull the base image here and build again, or set image_base: auto"
    )
