"""Which manifests a host is offered, and how it gets the image otherwise; the engines are stand-ins."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tridock.cluster.settings import load_cluster
from tridock.errors import ClusterError
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.pull import KNOWN, bring
from tridock.ops.image.registry import digest_of
from tridock.remote import LocalHost

DIFF_IDS = ["base", "code"]
CONFIG = json.dumps({"rootfs": {"diff_ids": DIFF_IDS}}).encode()

# The engines of all machines. `docker push` works as in Docker's classic store: each layer has digests in the order of
# their age, the newest of which is named if the registry has it, else the layer is compressed, always to the same
# digest. `docker pull` gets what the host, named by the second-last argument of its script, does not know.
ENGINE = r"""
import hashlib, http.client, json, os, pathlib, sys
folder, (verb, *words) = pathlib.Path(sys.argv[1]), sys.argv[2:]
state = json.loads((folder / "state").read_text())
def keep():  # another process may read it now
    part = folder / f"state.{os.getpid()}"
    part.write_text(json.dumps(state))
    part.replace(folder / "state")
def ask(address, method, path, body=None):
    connection = http.client.HTTPConnection(address)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers
def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()
if verb == "push":
    address, _, name = words[0].rpartition(":")[0].partition("/")
    if state["unreachable"]:
        sys.exit("dial tcp: connection refused")
    def send(content):
        where = ask(address, "POST", f"/v2/{name}/blobs/uploads/")[2]["Location"]
        ask(address, "PUT", f"{where}?digest={digest(content)}", content)
        with (folder / "sent").open("a") as sent:
            sent.write(content.decode() + "\n")
        return {"digest": digest(content), "size": len(content)}
    def named(content, known):
        if known:
            status, _, headers = ask(address, "HEAD", f"/v2/{name}/blobs/{known[-1]}")
            if status == 200:
                size = int(headers["Content-Length"])
                return {"digest": known[-1], **({"size": size} if size else {})}
        return send(content)
    layers = []
    for diff, known in state["digests"].items():
        layers.append(named(diff.encode(), known))
        if layers[-1]["digest"] not in known:
            known.append(layers[-1]["digest"])
    keep()
    other = [named(b"", [f"sha256:{it}"]) for it in "xy"]
    for config, its in ((state["config"], layers), *((it, other) for it in state["platforms"])):
        named_config = named(config.encode(), [digest(config.encode())])
        body = json.dumps({"mediaType": "m", "config": named_config, "layers": its})
        ask(address, "PUT", f"/v2/{name}/manifests/{len(config)}", body)
elif verb == "pull":
    address, _, rest = words[0].partition("/")
    name, _, reference = rest.partition("@")
    if state["behind"]:
        sys.exit("dial tcp: connection refused")
    manifest = json.loads(ask(address, "GET", f"/v2/{name}/manifests/{reference}")[1])
    with (folder / "offered").open("a") as offered:
        offered.write(json.dumps([[it["digest"], it["size"]] for it in manifest["layers"]]) + "\n")
    for layer in manifest["layers"]:
        if layer["digest"] in state["has"]:
            continue
        if layer["size"] == 0 and state["containerd"]:
            sys.exit("content size of zero")
        status, content, _ = ask(address, "GET", f"/v2/{name}/blobs/{layer['digest']}")
        if status != 200:
            sys.exit("unknown blob")
        assert digest(content) == layer["digest"]
        state["has"].append(layer["digest"])
    keep()
elif verb == "info":
    print("io.containerd.snapshotter" if state["containerd"] else "")
elif verb == "save":
    print("the whole image")
elif verb == "load":
    import gzip
    (folder / "loaded").write_bytes(gzip.decompress(sys.stdin.buffer.read()))
elif words[:2] == ["inspect", "--format"]:
    if words[2] != "{{json .}}":
        print(json.dumps(list(state["digests"])) if "Layers" in words[2] else words[2].replace("{{.Id}}", "sha256:2"))
"""


class Lab:
    def __init__(self, folder: Path, docker: Callable[[str], None]) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.cache.mkdir()
        (folder / "engine.py").write_text(ENGINE)
        docker(f'exec {shlex.quote(sys.executable)} {folder}/engine.py {folder} "$@"')
        self.state = {
            "config": CONFIG.decode(), "digests": dict[str, list[str]]((it, []) for it in DIFF_IDS), "has": list[str](),
            "containerd": False, "behind": False, "unreachable": False, "platforms": list[str](),
        }  # fmt: skip

    def bring(self, **state: object) -> list[list[tuple[str, int]]]:
        """Brings the image to one host; returns the layers of each manifest that it was offered."""
        for name in ("offered", "sent", "loaded"):
            (self.folder / name).unlink(missing_ok=True)
        self.state |= state
        (self.folder / "state").write_text(json.dumps(self.state))
        (self.folder / "lab").write_text("gpu-1 slots=1\n")
        (self.folder / "lab.yaml").write_text(f"workdir: {self.folder}/there\n")
        hosts = Hosts(load_cluster(self.folder / "lab"), {"gpu-1": LocalHost("gpu-1")})
        try:
            bring(hosts, "sha256:1", ("gpu-1",), self.cache)
        finally:
            self.state = json.loads((self.folder / "state").read_text())
            for path in self.cache.glob("sha256:*"):
                path.unlink()
        return [[(digest, size) for digest, size in json.loads(line)] for line in self.lines("offered")]

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def lab(tmp_path: Path, docker: Callable[[str], None]) -> Lab:
    return Lab(tmp_path, docker)


BASE, CODE = ((digest_of(it.encode()), len(it)) for it in DIFF_IDS)
PULLED = "sha256:" + "a" * 64
"""The base layer's digest in its registry."""


def test_a_host_gets_what_it_lacks_and_the_ids_are_noted(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.bring() == [[BASE, CODE]]
    assert capsys.readouterr().out == "gpu-1: got 2 layers of the image, 0.0 MB\n"
    assert next((lab.folder / "there").rglob("images.gpu-1")).read_text() == "sha256:1 sha256:2\n"
    assert lab.bring() == [[BASE, CODE]]
    assert capsys.readouterr().out == "gpu-1: got 0 layers of the image, 0.0 MB\n"
    assert lab.lines("sent") == [CONFIG.decode()]


def test_a_layer_keeps_the_digest_that_it_has_elsewhere(lab: Lab) -> None:
    """For hosts that pulled the base; another one gets it as the engine here compresses it, now and in later edits."""
    lab.state["digests"] = {"base": [PULLED], "code": []}
    assert lab.bring(has=[PULLED]) == [[(PULLED, 0), CODE]]
    assert lab.lines("sent") == ["code", CONFIG.decode()]
    assert lab.bring(has=[CODE[0]]) == [[(PULLED, 0), CODE], [BASE, CODE]]
    assert "base" in lab.lines("sent")
    # The engine names the newest digest from now on.
    assert lab.bring(has=[PULLED, CODE[0]]) == [[(PULLED, 0), CODE]]
    assert lab.bring(has=[BASE[0], CODE[0]]) == [[(PULLED, 0), CODE], [BASE, CODE]]
    assert lab.lines("sent") == [CONFIG.decode()]


def test_of_an_image_for_several_platforms_hosts_get_the_engines_own(lab: Lab) -> None:
    """The other one, which is pushed last, has as many layers; the configurations tell them apart."""
    other = json.dumps({"architecture": "arm64", "rootfs": {"diff_ids": ["x", "y"]}})
    lab.state["digests"] = {"base": [BASE[0]], "code": []}
    assert lab.bring(platforms=[other], has=[BASE[0]]) == [[(BASE[0], 0), CODE]]
    assert lab.lines("sent") == ["code", CONFIG.decode(), other]


def test_containerds_store_is_offered_sizes_only_that_are_known(lab: Lab) -> None:
    lab.state["digests"] = {"base": [PULLED], "code": []}
    assert lab.bring(containerd=True) == [[BASE, CODE]]
    known = json.loads((lab.cache / KNOWN).read_text())
    known["sizes"][PULLED] = 7
    (lab.cache / KNOWN).write_text(json.dumps(known))
    assert lab.bring(containerd=True, has=[PULLED, CODE[0]]) == [[(PULLED, 7), CODE]]


@pytest.mark.parametrize(
    ("state", "note"),
    [
        (
            {"unreachable": True},
            "hosts get the whole image (docker save), docker push does not reach this command: ",
        ),
        ({"behind": True}, "gpu-1: gets the whole image (docker save), it cannot pull it through ssh: "),
    ],
    ids=["operator", "host"],
)
def test_where_an_engine_has_another_loopback_the_whole_image_is_loaded(
    lab: Lab, state: dict[str, object], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab.bring(**state) == []
    assert (lab.folder / "loaded").read_text() == "the whole image\n"
    printed = capsys.readouterr()
    assert printed.err == f"{note}dial tcp: connection refused\n"
    assert printed.out == "gpu-1: got the whole image, 0.0 MB\n"
    assert next((lab.folder / "there").rglob("images.gpu-1")).read_text() == "sha256:1 sha256:2\n"


def test_a_pull_that_fails_for_another_reason_fails(lab: Lab) -> None:
    lab.state["digests"] = {"base": [BASE[0]], "code": []}
    (lab.folder / "engine.py").write_text(
        ENGINE.replace("unknown blob", "no space left on device").replace("!= 200", "!= 0")
    )
    with pytest.raises(ClusterError) as caught:
        lab.bring()
    assert str(caught.value) == (
        "gpu-1: docker pull failed; got no space left on device; "
        "free some space there (docker system df shows Docker's share; df -i the inodes)"
    )
    assert not (lab.folder / "loaded").exists()
