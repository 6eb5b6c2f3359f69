"""The base that hosts can pull, and older images: what is ours, and what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tridock.cluster.settings import load_cluster
from tridock.command import Command
from tridock.errors import ClusterError
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.ensure import _PRUNE
from tridock.ops.image.registries import Base, base_of, pull_base, sizes_in_registry
from tridock.remote import LocalHost

IMAGES = {
    "local": (None, ["a", "b"]),
    "base": (["nvcr.io/nvidia/pytorch@sha256:1", "mirror/pytorch@sha256:1"], ["a", "b"]),
    "smaller": (["debian@sha256:2"], ["a"]),
    "other": (["other@sha256:3"], ["x", "b"]),
    "itself": (["me/tridock@sha256:4"], ["a", "b", "c"]),
}


@pytest.mark.parametrize(
    ("there", "base"),
    [
        ([*IMAGES], Base("nvcr.io/nvidia/pytorch@sha256:1", 2)),
        (["local", "smaller", "other", "itself"], Base("debian@sha256:2", 1)),
        (["local", "other", "itself"], None),
        ([], None),
    ],
    ids=["largest", "the rest", "none of a registry", "no image"],
)
def test_the_base_is_the_largest_beginning_that_a_registry_has(
    docker: Callable[[str], None], there: list[str], base: Base | None
) -> None:
    lines = "\n".join(
        json.dumps({"RepoDigests": digests, "RootFS": {"Layers": layers}})
        for digests, layers in map(IMAGES.__getitem__, there)
    )
    docker(f"case $2 in ls) echo '{' '.join(there)}';; inspect) cat <<'END'\n{lines}\nEND\nesac")
    assert base_of(("a", "b", "c")) == base


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        ({"Pull": [{"Repository": "docker.io/library/debian"}]}, True),
        ({"Build": [{"Ref": "to59", "CreatedAt": "2026-11-25T12:46:26Z"}]}, False),
        ({"Pull": [{"Repository": "127.0.0.1/tridock-d73c/image"}], "Build": [{"Ref": "uhqy"}]}, False),
        ({"Pull": [{"Repository": "lab:5000/base"}], "Build": [{"Ref": "uhqy"}]}, True),
        (None, True),
        ({}, True),
    ],
    ids=["pulled", "built", "given away by Tridock", "pushed", "before 29", "nothing known"],
)
def test_an_image_that_was_only_built_here_is_no_base_of_a_registry(
    docker: Callable[[str], None], identity: object, found: bool
) -> None:
    """With containerd's image store it has a digest too. As Docker 29.7.2 prints it."""
    image = {
        "Id": "sha256:805c", "RepoTags": ["base:1"], "RepoDigests": ["base@sha256:805c"],
        "Architecture": "amd64", "RootFS": {"Type": "layers", "Layers": ["a"]},
    }  # fmt: skip
    line = json.dumps(image if identity is None else {**image, "Identity": identity})
    docker(f"case $2 in ls) echo sha256:805c;; inspect) echo '{line}';; esac")
    assert (base_of(("a", "b")) == Base("base@sha256:805c", 1)) is found


def test_only_images_that_were_brought_and_are_not_used_are_pruned(
    docker: Callable[[str], None], tmp_path: Path
) -> None:
    docker(
        r"""case "$2 $5$3" in
"inspect lab--format") echo current ;;
"inspect old--format" | "inspect used--format") echo 0 ;;
"inspect named--format") echo 1 ;;
"inspect current--format") echo 1 ;;
"rm old" | "rm named") ;;
"rm used") exit 1 ;;
*) exit 1 ;;
esac"""
    )
    notes = tmp_path / "images"
    notes.write_text("x old\nused y\nnamed\ngone\nz current\nx old\n")
    command = Command.of("sh", "-c", _PRUNE, "prune", str(notes), "lab")
    done = LocalHost().run(command).checked("here")
    assert done.stdout.decode().splitlines() == ["kept named", "kept used", "removed old"]
    assert notes.read_text().split() == ["named", "used", "y", "z", "current"]
    notes.unlink()
    assert LocalHost().run(command).checked("here").stdout == b""


def pulled(docker: Callable[[str], None], folder: Path, policy: str, base: Base | None, there: str, pull: str) -> str:
    """Lets hosts whose engines have images with these layers pull the base; returns the commands of their engines."""
    (folder / "lab").write_text("gpu-1 slots=1\ngpu-2 slots=1\n")
    (folder / "lab.yaml").write_text(f"image_base: {policy}\n")
    docker(f"echo \"$*\" >>{folder}/asked; case $1 in image) [ $2 = ls ] || echo '{there}';; pull) {pull};; esac")
    hosts = Hosts(load_cluster(folder / "lab"), {node: LocalHost(node) for node in ("gpu-1", "gpu-2")})
    pull_base(hosts, base, ["a", "b", "c"], hosts.nodes)
    asked = folder / "asked"
    return asked.read_text() if asked.exists() else ""


BASE = Base("nvcr.io/nvidia/pytorch@sha256:1", 2)
FAILS = "echo no route to host >&2; exit 1"


def test_hosts_that_lack_the_base_pull_it(
    docker: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = pulled(docker, tmp_path, "auto", BASE, '["a", "x"]', FAILS)
    assert asked.count(f"pull --quiet {BASE.reference}\n") == 2
    assert capsys.readouterr().err == (
        f"gpu-1, gpu-2: docker pull {BASE.reference}\n"
        "gpu-1, gpu-2: gets the base image from here, it cannot pull it: no route to host\n"
    )


@pytest.mark.parametrize(
    ("policy", "base", "there"),
    [("auto", BASE, '["a", "b", "x"]'), ("send", BASE, ""), ("auto", None, "")],
    ids=["there", "policy", "no base"],
)
def test_nobody_pulls(
    docker: Callable[[str], None], tmp_path: Path, policy: str, base: Base | None, there: str
) -> None:
    assert "pull" not in pulled(docker, tmp_path, policy, base, there, FAILS)


def test_where_the_base_must_be_pulled_it_is_never_sent(docker: Callable[[str], None], tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        pulled(docker, tmp_path, "pull", BASE, "", FAILS)
    assert str(caught.value).splitlines() == [
        f"{node}: cannot pull the base image; got no route to host; "
        f"make docker pull {BASE.reference} work there, or set image_base: auto"
        for node in ("gpu-1", "gpu-2")
    ]
    with pytest.raises(ClusterError) as caught:
        pulled(docker, tmp_path, "pull", None, "", FAILS)
    assert str(caught.value) == (
        "image_base: pull: the local Docker engine has no base image from a registry; "
        "docker pull the base image here and build again, or set image_base: auto"
    )


def test_the_sizes_of_all_platforms_are_known(docker: Callable[[str], None]) -> None:
    docker("""case $5 in
base@sha256:1) echo '{"manifests": [{"digest": "sha256:2"}, {"digest": "sha256:3"}]}' ;;
base@sha256:2) echo '{"layers": [{"digest": "sha256:4", "size": 5}]}' ;;
*) exit 1 ;;
esac""")
    assert sizes_in_registry("base@sha256:1") == {"sha256:4": 5}
