"""Faults of hosts, keys and commands that meet: two Docker hosts, and nodes of an image without torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.rack import CLUSTER, PROGRAMS, SHARED, WORKDIR, Rack, build_host_image
from tests.integration.rack_runs import NODE, RUNS, SLEEP, a_run, one_host, sleeping, state_of
from tests.integration.support import execute, own_name, succeed, wait_until
from tests.patience import STEP_S, WORK_S
from tridock.cluster.settings import load_cluster
from tridock.errors import RequestError
from tridock.ops.hosts.attached import nodes_locked
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.nodes import containers

# By themselves: tests/unit/ops/test_attached.py (the lock), tests/unit/ops/test_keys.py, tests/distributed/
# test_device_locks.py (a login that is refused), test_two_operators.py (the rest).
pytestmark = pytest.mark.full
ON_CPU = {"DS_ACCELERATOR": "cpu"}
OTHERWISE = {"name": CLUSTER, "env": {**ON_CPU, "OMP_NUM_THREADS": "2"}}
"""Settings that no node of the cluster has."""
# `tridock up` that stands still, as a laptop whose lid is closed, once it has found no run in the nodes.
PAUSED_UP = """
import os, signal, sys
from pathlib import Path
from tridock.errors import TridockError
from tridock.cluster.settings import load_cluster
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.nodes import containers as nodes

distribute = nodes.distribute_keys
def paused(*given, **named):
    os.kill(os.getpid(), signal.SIGSTOP)
    return distribute(*given, **named)
nodes.distribute_keys = paused
try:
    nodes.up(Hosts(load_cluster(Path(sys.argv[1]))))
except TridockError as error:
    sys.exit(str(error))
"""


@pytest.fixture(scope="module")
def hosts(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Two hosts with a node each, of Tridock's layer on Debian."""
    build_host_image()
    made = Rack(own_name(), tmp_path_factory.mktemp("faults"))
    try:
        made.start()
        made.write_project()
        made.write_cluster(CLUSTER, env=ON_CPU)
        succeed(
            *(sys.executable, "-m", "tridock.cli", "image", "wrap", "debian:bookworm-slim", "--tag", made.image),
            cwd=made.project,
            env=made.environment(),
        )
        done = made.fab("up")
        assert done.returncode == 0, done.stdout + done.stderr
        yield made
    finally:
        made.remove()


@pytest.fixture
def clone(hosts: Rack) -> Iterator[Path]:
    """Another operator's copy of the project, without keys."""
    other = hosts.folder / "clone"
    shutil.copytree(hosts.project, other, ignore=shutil.ignore_patterns(".tridock", "cache", "runs"))
    yield other
    shutil.rmtree(other)


def in_clone(rack: Rack, clone: Path, task: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [str(PROGRAMS / "fab"), task, "--hosts", f"hostfiles/{CLUSTER}", *arguments]
    return execute(*argv, cwd=clone, env=rack.environment(PYTHONPATH=str(clone)))


def ids(rack: Rack) -> list[str]:
    return [host.sh(f"docker inspect --format '{{{{.Id}}}}' {NODE}") for host in rack]


# ---- the lock on a cluster's nodes ---------------------------------------------------------------


def test_a_paused_up_removes_no_node_under_a_run_that_began_meanwhile(hosts: Rack) -> None:
    before = ids(hosts)
    changed = hosts.write_cluster("changed", **OTHERWISE)
    argv = [sys.executable, "-c", PAUSED_UP, changed]
    up = subprocess.Popen(
        argv, cwd=hosts.project, env=hosts.environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_until(lambda: "T" in Path(f"/proc/{up.pid}/stat").read_text().rpartition(")")[2][:3], "it stands still")
        with a_run(hosts, "meanwhile") as run_id:
            up.send_signal(signal.SIGCONT)
            _, said = up.communicate(timeout=STEP_S)
            assert up.returncode == 1
            assert "another command has changed the cluster's nodes since this one was paused" in said
            assert ids(hosts) == before
            assert all(host.processes(run_id, "^sleep") for host in hosts)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(up.pid, signal.SIGKILL)


def test_a_launch_waits_for_the_lock(hosts: Rack) -> None:
    cluster = Hosts(load_cluster(hosts.project / "hostfiles" / CLUSTER))
    with nodes_locked(cluster), hosts.attached(*sleeping("waiting"), *SLEEP) as terminal:
        wait_until(lambda: "waiting for it" in terminal.text(), "it waits")
        assert "changes the nodes of rack" in terminal.text()
        assert not (hosts.project / "waiting").exists()
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(STEP_S) == 130


def test_a_host_removes_no_node_with_a_run_in_it(hosts: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the operator's side has found out before."""
    before = ids(hosts)
    monkeypatch.setattr(containers, "_refuse_while_runs", lambda *_: None)
    with a_run(hosts, "unseen") as run_id:
        changed = hosts.write_cluster("changed", **OTHERWISE)
        for change in (containers.up, containers.down):
            with pytest.raises(RequestError, match=rf"host-a: .* while a run is active; got {run_id} \(started by"):
                change(Hosts(load_cluster(hosts.project / changed)))
        assert ids(hosts) == before
        assert all(host.processes(run_id, "^sleep") for host in hosts)


# ---- keys ----------------------------------------------------------------------------------------


def secrets(rack: Rack) -> list[str]:
    return [host.sh(f"cd {WORKDIR}/secrets && sha256sum */* && stat -c '%i %n' */*") for host in rack]


def stored(project: Path) -> object:
    return json.loads((project / ".tridock" / CLUSTER / ".keys.json").read_text())


def test_another_clone_takes_over_the_clusters_keys(hosts: Rack, clone: Path) -> None:
    with a_run(hosts, "keyed") as run_id:
        before = secrets(hosts)
        done = in_clone(hosts, clone, "up")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr.startswith("took over the keys of rack from its hosts: SHA256:")
        assert secrets(hosts) == before
        assert stored(clone) == stored(hosts.project)
        assert all(host.processes(run_id, "^sleep") for host in hosts)
    # A rotation is everybody's too, and is not undone by those who have the old ones.
    assert in_clone(hosts, clone, "keys", "--rotate").returncode == 0
    rotated = secrets(hosts)
    assert rotated != before
    assert hosts.fab("up").returncode == 0
    assert secrets(hosts) == rotated
    assert stored(clone) == stored(hosts.project)


def test_a_node_that_does_not_let_the_head_in_is_named_at_once(hosts: Rack) -> None:
    host = hosts["host-b"]
    allowed = f"{WORKDIR}/secrets/host-b/authorized_keys"
    with a_run(hosts, "refused", "--restarts", "2") as run_id, host.without(allowed):
        host.signal("KILL", host.processes(run_id, "^sleep"))
        log = f"{RUNS}/{run_id}/logs/launcher.log"
        wait_until(lambda: state_of(hosts, run_id) == "failed", "the restarts have failed", WORK_S)
        events = [json.loads(line) for line in hosts["host-a"].sh(f"cat {RUNS}/{run_id}/events.jsonl").splitlines()]
        refused = next(event for event in events if event.get("cause") == "login_refused")
        assert refused["node"] == "host-b", hosts["host-a"].sh(f"cat {log}")
        assert "does not let the head in: " in refused["reason"]
        assert "Permission denied (publickey)" in refused["reason"]
        assert "login-refused (docs/triage.md)" in hosts.fab("triage", "--run", run_id).stdout


# ---- engines -------------------------------------------------------------------------------------


def test_an_engine_that_remaps_users_is_known_before_the_image_travels(hosts: Rack) -> None:
    host = hosts["host-b"]
    options = f"--data-root {SHARED}/remapped --exec-root /run/remapped --pidfile /run/remapped.pid"
    host.sh(
        "echo 'export DOCKER_HOST=unix:///run/remapped.sock' >/home/trainer/.bashrc\n"
        f"nohup dockerd --userns-remap trainer --host unix:///run/remapped.sock --group docker {options} "
        "--bridge none --iptables=false >/var/log/remapped.log 2>&1 &"
    )
    try:
        asked = "DOCKER_HOST=unix:///run/remapped.sock docker version"
        wait_until(lambda: host.execute(asked).returncode == 0, "its second engine answers")
        plain = hosts.write_cluster("remapped", "host-b slots=1\n", **one_host(hosts), env=ON_CPU, ssh_port=2223)
        done = hosts.fab("up", hosts=plain)
        assert (done.returncode, done.stdout, done.stderr) == (
            3, "",
            "host-b: its Docker engine remaps users; got userns-remap: a node could not read its keys; "
            'let the nodes do without: container.extra_args: ["--userns=host"] in the settings\n',
        )  # fmt: skip
        options = {"gpus": "none", "ulimits": {}, "extra_args": ["--userns=host"]}
        allowed = hosts.write_cluster(
            "remapped", "host-b slots=1\n", **one_host(hosts), env=ON_CPU, ssh_port=2223, container=options
        )
        done = hosts.fab("up", hosts=allowed)
        assert done.returncode == 0, done.stdout + done.stderr
        assert hosts.fab("down", hosts=allowed).returncode == 0
    finally:
        host.sh("rm /home/trainer/.bashrc; kill $(cat /run/remapped.pid)")
        wait_until(lambda: host.execute("test -e /run/remapped.pid").returncode == 1, "its second engine has ended")
        # The last of its mounts may go a moment later.
        wait_until(lambda: host.execute(f"rm -rf {SHARED}/remapped").returncode == 0, "its files are gone")
