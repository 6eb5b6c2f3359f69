"""What a node says of itself, and to the head that calls it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.patience import STEP_S
from tests.unit.node.conftest import answer
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import PROTOCOL, NodeReport, SshAnswer
from tridock.contracts.run_folder import PYTHON
from tridock.node.probes import ssh_mesh_probe
from tridock.node.probes.limits_and_space import cores, space, write_error
from tridock.node.probes.node_report import digest, no_reduction
from tridock.node.probes.ssh_mesh_probe import shared_environment

TOKEN = "0123456789ab"
T = TypeVar("T")


def test_the_report_of_this_machine(workspace: Path) -> None:
    (workspace / "runs").mkdir(parents=True)
    found = answer("node-report", "--workspace", str(workspace))
    quick = answer("node-report", "--quick", "--workspace", str(workspace))
    gpus = {"built_for", "cuda_error", "capabilities", "architectures"}
    assert set(quick) == {"protocol", "shm", "disk", "unwritable", *gpus, "ssh", "network"}
    assert set(quick) < set(found)
    assert decode(NodeReport, json.dumps(found)).protocol == PROTOCOL
    assert (found["unwritable"], list((workspace / "runs").iterdir())) == (None, [])
    assert found["disk"]["bytes"] >= found["disk"]["free"] > 0
    assert 20000 <= found["rendezvous"]["port"] < 30000
    assert found["cores"] == cores()


@pytest.mark.parametrize(
    ("python", "why"),
    [
        (None, "no python on PATH"),
        ("echo 3.12 False", "no torch in its Python 3.12"),
        ("echo 3.8 True", "Python 3.8, and the all-reduce needs 3.11"),
        ("echo 3.12 True", None),
        ("echo broken >&2; exit 1", None),
    ],
)
def test_why_an_image_cannot_run_the_all_reduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None, why: str | None
) -> None:
    if python is not None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{python}\n")
        (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert no_reduction() == why


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    assert (space(tmp_path / "nothing"), write_error(tmp_path / "nothing")) == (None, "no such file or directory")


def without_inodes(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with a disk at /mnt that has space and no inodes."""
    script = 'mount -t tmpfs -o nr_inodes=2 tmpfs /mnt || exit 77; touch /mnt/a; exec "$@"'
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", sys.executable, *words]
    done = subprocess.run(unshared, capture_output=True, text=True, check=False)
    if done.returncode in (1, 77):
        pytest.skip(f"no file system of its own here: {done.stderr.strip()}")
    return done


def test_a_disk_without_inodes_is_not_without_space() -> None:
    asked = "from tridock.node.probes.limits_and_space import Path, write_error; print(write_error(Path('/mnt')))"
    assert without_inodes("-c", asked).stdout == "no inodes left\n"


def test_the_operators_disk_without_inodes() -> None:
    plan = ("plan", "--config", "configs/demo.yaml", "--nodes", "1", "--gpus-per-node", "1", "--plot", "/mnt/map.svg")
    done = without_inodes("-m", "tridock.cli", *plan)
    message = (
        "cannot be written; got no inodes left; remove small files on that disk (du --inodes shows where they are)"
    )
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_code_differs_where_a_file_or_a_name_does(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "code").mkdir(parents=True)
        (tmp_path / name / "code" / "a.py").write_text("a = 1\n")
    one, two = tmp_path / "one" / "code", tmp_path / "two" / "code"
    assert digest([one]) == digest([two])
    (one / "__pycache__").mkdir()
    (one / "__pycache__" / "a.pyc").write_text("compiled")
    assert digest([one]) == digest([two])
    (two / "a.py").write_text("a = 2\n")
    assert digest([one]) != digest([two])
    (two / "a.py").write_text("a = 1\n")
    (two / "a.py").rename(two / "b.py")
    assert digest([one]) != digest([two])
    assert digest([tmp_path / "nothing"]) is None


def test_the_environment_that_nodes_share_without_its_secrets() -> None:
    given = {
        "PATH": "/bin", "HOME": "/root", "TRIDOCK_NODE": "a", "TRIDOCK_CLUSTER": "lab", "SSH_CLIENT": "192.0.2.1 1 2",
        "HF_TOKEN": "hf_abc", "WANDB_API_KEY": "k", "DB_PASSWORD": "p",
        "https_proxy": "http://me:word@proxy:3128",
    }  # fmt: skip
    found = shared_environment(given, "salt")
    assert {name: found[name] for name in ("PATH", "TRIDOCK_CLUSTER")} == {"PATH": "/bin", "TRIDOCK_CLUSTER": "lab"}
    assert set(found) == {"PATH", "TRIDOCK_CLUSTER", "HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "https_proxy"}
    assert not [word for word in ("hf_abc", "word@") if word in str(found)]
    assert shared_environment(given, "salt") == found
    assert shared_environment(given, "other")["HF_TOKEN"] != found["HF_TOKEN"]
    assert shared_environment({**given, "HF_TOKEN": "hf_abd"}, "salt")["HF_TOKEN"] != found["HF_TOKEN"]


# ---- the mesh probe -----------------------------------------------------------------------------------


@contextmanager
def called(node: str, workspace: Path) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "TRIDOCK_NODE": node}
    argv = [sys.executable, "-m", "tridock.node", "mesh-respond", TOKEN, "--workspace", str(workspace)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], request: Mapping[str, object] | None = None) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if request is not None:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


def peer(port: int, address: str = "127.0.0.1") -> dict[str, object]:
    return {"address": address, "port": port, "listens": ["127.0.0.1"]}


def test_two_nodes_that_share_a_folder_reach_each_other(workspace: Path) -> None:
    runs = workspace / "runs"
    runs.mkdir(parents=True)
    with called("a", workspace) as a, called("b", workspace) as b:
        hello = {"a": ask(a), "b": ask(b)}
        assert hello["a"]["folder"] == hello["b"]["folder"] == (runs / ".folder-id").read_text()
        assert abs(ask(a, {})["time"] - ask(b, {})["time"]) < STEP_S
        seen = ask(a, {"peers": {"b": peer(hello["b"]["port"])}})
        assert seen == {
            "unreached": [],
            "routes": {"b": {"target": "127.0.0.1", "source": "127.0.0.1", "interface": "lo", "error": ""}},
        }
        for process in (a, b):
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=STEP_S) == 0
    assert [path.name for path in runs.iterdir()] == [".folder-id"]


def test_a_port_that_is_closed_or_somebody_elses_and_a_name_that_leads_nowhere(workspace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with called("a", workspace) as a, called("b", workspace) as b:
        ask(a)
        other = ask(b)["port"]
        seen = ask(a, {"peers": {"c": peer(port), "d": peer(other, "no-such-host.invalid")}})
        assert seen["unreached"] == [
            {"node": "c", "address": "127.0.0.1", "error": "connection refused"},
            {"node": "d", "address": "127.0.0.1", "error": "somebody else answers there"},
        ]
        assert seen["routes"]["d"]["error"] != ""


def test_a_responder_whose_caller_was_killed_ends(workspace: Path) -> None:
    with called("a", workspace) as a:
        ask(a)
        a.terminate()
        assert a.wait(timeout=STEP_S) == 0


SSH = """#!/bin/sh
# Stands in for ssh: the node's name is the last word but one.
while [ $# -gt 2 ]; do shift; done
export TRIDOCK_CLUSTER=lab TRIDOCK_NODE=$1
case $1 in
refused) echo "connect to host refused port 2222: Connection refused" >&2; exit 255 ;;
foreign) unset TRIDOCK_CLUSTER TRIDOCK_NODE; PATH=/usr/bin:/bin exec /bin/sh -c "echo hello; $2" ;;
silent) exec sleep 9999 ;;
esac
exec /bin/sh -c "$2"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "bin" / PYTHON).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "bin" / PYTHON).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(ssh_mesh_probe.__file__).parents[2]))


def patiently(monkeypatch: pytest.MonkeyPatch, probe: Callable[[], T], answered: Callable[[T], bool]) -> T:
    """Returns what a probe finds within a few seconds, or in more where a busy machine starts the nodes' Python late.
    The silent node takes all of that time."""
    for seconds in (2.5, 12.5, 60.0, STEP_S):
        monkeypatch.setattr(ssh_mesh_probe, "_TIMEOUT_S", seconds)
        found = probe()
        if answered(found):
            break
    return found


def test_the_head_greets_all_nodes_concurrently(ssh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ["a", "refused", "silent"]
    met = patiently(
        monkeypatch,
        lambda: ssh_mesh_probe.greet_nodes(nodes),
        lambda met: None not in (met["a"].exit, met["refused"].exit),
    )
    assert met == {
        "a": SshAnswer(0, "tridock-node lab a\n", ""),
        "refused": SshAnswer(255, "", "connect to host refused port 2222: Connection refused\n"),
        "silent": SshAnswer(None, "", ""),
    }


def test_the_mesh_probe_reports_nodes_that_answer_and_that_do_not(ssh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = dict.fromkeys(("a", "b", "refused", "foreign", "silent"), "127.0.0.1")
    met = patiently(
        monkeypatch,
        lambda: ssh_mesh_probe.probe_mesh(addresses, TOKEN),
        lambda met: (
            all(met[node].peers is not None and met[node].clock is not None for node in ("a", "b"))
            and None not in (met["refused"].ssh.exit, met["foreign"].ssh.exit)
        ),
    )
    assert {node: met[node].ssh.exit for node in ("a", "b", "refused", "silent")} == {
        "a": 0, "b": 0, "refused": 255, "silent": None,
    }  # fmt: skip
    assert [met[node].ssh.out for node in ("a", "foreign", "refused")] == ["tridock-node lab a\n", "hello\n", ""]
    assert met["foreign"].hello is None
    for node, other in (("a", "b"), ("b", "a")):
        clock, peers = met[node].clock, met[node].peers
        assert clock is not None
        assert peers is not None
        assert (peers.unreached, list(peers.routes)) == ((), [other])
        # The clock of the same machine, within the time of a round trip.
        assert abs(clock.offset) <= clock.error + 0.001
