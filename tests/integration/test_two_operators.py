"""Several operators on the same hosts: of one cluster from several clones, and of two clusters from two accounts."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.rack import CLUSTER, PROGRAMS, UID, WORKDIR, Rack, Up
from tests.integration.rack_runs import RUNS, SLEEP, run_id_of, sleeping, state_of
from tests.integration.support import execute, wait_until
from tests.patience import STEP_S

NODE = f"tridock-{CLUSTER}"
HOSTS = ("host-a", "host-b")
MACHINE = socket.gethostname()
ADA, BOB = {"USER": "ada"}, {"USER": "bob"}


def up_at_once(rack: Rack, *projects: Path) -> None:
    """Runs `fab up` in every project at once, on hosts without nodes."""
    assert rack.fab("down").returncode == 0

    def up(project: Path) -> None:
        environment = rack.environment(PYTHONPATH=str(project), XDG_CACHE_HOME=f"{project}/cache")
        done = execute(str(PROGRAMS / "fab"), "up", "--hosts", f"hostfiles/{CLUSTER}", cwd=project, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("2 nodes up, image ")

    with ThreadPoolExecutor() as pool:
        list(pool.map(up, projects))
    assert [host.containers() for host in rack] == [{NODE: "running"}] * 2
    for source in HOSTS:
        for target in HOSTS:
            assert rack.node(source, "ssh", target, "echo $TRIDOCK_NODE") == f"{target}\n"


@pytest.mark.full  # two operators, below
def test_one_operator_twice(rack_up: Up) -> None:
    rack = rack_up.rack
    up_at_once(rack, rack.project, rack.project, rack.project)


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.full)])
def test_two_operators_share_the_clusters_keys(rack_up: Up, times: int) -> None:
    rack = rack_up.rack
    other = rack.folder / "other"
    shutil.copytree(rack.project, other, ignore=shutil.ignore_patterns(".tridock", "cache"))
    try:
        for _ in range(times):
            up_at_once(rack, rack.project, other)
    finally:
        shutil.rmtree(other)


def test_nodes_with_the_keys_of_two_clusters_are_named(rack_up: Up) -> None:
    rack, clone = rack_up.rack, rack_up.rack.folder / "clone"
    shutil.copytree(rack.project, clone, ignore=shutil.ignore_patterns(".tridock", "cache", "runs"))
    kept = rack["host-b"].sh(f"tar -C {WORKDIR}/secrets -c host-b | base64")
    rack["host-b"].sh(
        f"cd {WORKDIR}/secrets/host-b && rm id_ed25519 && ssh-keygen -q -t ed25519 -N '' -f id_ed25519 && "
        "chown trainer:trainer id_ed25519*"
    )
    try:
        argv = (str(PROGRAMS / "fab"), "up", "--hosts", f"hostfiles/{CLUSTER}")
        done = execute(*argv, cwd=clone, env=rack.environment(PYTHONPATH=str(clone)))
        assert done.returncode == 3
        assert "host-b: has other keys than the cluster's other nodes; got client key SHA256:" in done.stderr
        assert done.stderr.rstrip().endswith("give all of them new ones: tridock keys --rotate")
    finally:
        shutil.rmtree(clone)
        rack["host-b"].sh('echo "$1" | base64 -d | tar -C "$2" -xp', kept, f"{WORKDIR}/secrets")
    assert rack.fab("up").returncode == 0


# ---- one cluster, two people ---------------------------------------------------------------------


def started(rack: Rack, name: str, *options: str, hosts: str = f"hostfiles/{CLUSTER}", **environment: str) -> str:
    """The id of a run that does not end by itself."""
    done = rack.fab(*sleeping(name), *options, *SLEEP, hosts=hosts, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_id_of(rack.project / name)


def test_a_run_of_a_colleague_is_ended_by_force_alone(rack_up: Up) -> None:
    """From a fresh clone, as CI has it: it has no keys of the cluster, and nobody to ask."""
    rack = rack_up.rack
    clone = rack.folder / "ci"
    shutil.copytree(rack.project, clone, ignore=shutil.ignore_patterns(".tridock", "cache"))

    def ci(*words: str, hosts: str = f"hostfiles/{CLUSTER}") -> tuple[int, list[str]]:
        environment = rack.environment(**BOB, PYTHONPATH=str(clone))
        done = execute(str(PROGRAMS / "tridock"), words[0], "--hosts", hosts, *words[1:], cwd=clone, env=environment)
        return done.returncode, done.stderr.splitlines()

    run_id, waiting = started(rack, "adas", **ADA), started(rack, "waits", "--queue", **ADA)
    nobody = f"was not started by you (bob@{MACHINE}); got ada@{MACHINE}; ask them, or give --force"
    try:
        assert ci("stop", "--run", run_id) == (2, [f"{run_id}: {nobody}"])
        assert ci("stop") == (2, [f"{run_id}: {nobody}"])
        assert ci("cancel", "--run", waiting) == (2, [f"{waiting}: {nobody}"])
        rack.write_cluster("changed", name=CLUSTER, env={"OTHER": "1"})
        shutil.copy(rack.project / "hostfiles/changed.yaml", clone / "hostfiles/changed.yaml")
        shutil.copy(rack.project / "hostfiles/changed", clone / "hostfiles/changed")
        for words, fate in ((("down",), "removed by tridock down"), (("up",), "replaced by tridock up")):
            code, said = ci(*words, hosts="hostfiles/changed")
            active = f"its node would be {fate} while a run is active; got {run_id} (started by ada@{MACHINE})"
            assert (code, said) == (2, [f"{host}: {active}; stop the run first: tridock stop" for host in HOSTS])
        assert state_of(rack, run_id) == "running"
        code, said = ci("run", "--workdir", "hostfiles", "--detach", "--", "true")
        assert (code, said[0].partition(":")[0]) == (2, f"took over the keys of {CLUSTER} from its hosts")
        assert f"{run_id}: is running on slots that this run would use; got host-a: 0, host-b: 0" in said[-1]
        assert f", started by ada@{MACHINE}; " in said[-1]
        assert ci("cancel", "--run", waiting, "--force") == (0, [])
        assert ci("stop", "--run", run_id, "--force") == (0, [])
        assert state_of(rack, run_id) == "stopped"
        code, said = ci("resume", "--run", run_id, "--yes", "--no-check")
        assert (code, said[-1]) == (2, f"{run_id}: {nobody}")
        assert state_of(rack, run_id) == "stopped"
        assert ci("runs", "rm", "--yes", run_id, waiting) == (2, [f"{run_id}: {nobody}", f"{waiting}: {nobody}"])
        assert ci("runs", "prune", "--keep", "0", "--yes")[0] == 0
        assert rack["host-a"].execute(f"test -d {RUNS}/{run_id}").returncode == 0
        assert ci("runs", "rm", "--yes", "--force", run_id)[0] == 0
        assert rack["host-a"].execute(f"test -d {RUNS}/{run_id}").returncode == 1
    finally:
        shutil.rmtree(clone)
        rack.fab("stop", "--run", run_id, "--force")


# ---- two clusters, two accounts ------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(rack_up: Up) -> Iterator[str]:
    """The hostfile of another cluster on the same hosts, of another account there."""
    rack = rack_up.rack
    for host in rack:
        host.sh(
            "useradd --create-home --shell /bin/bash --uid 1301 --groups docker other"
            " && cp -r /home/trainer/.ssh /home/other/ && chown -R other:other /home/other/.ssh"
        )
    ssh = {"config_file": str(rack.folder / "ssh_config"), "user": "other"}
    hostfile = rack.write_cluster("second", ssh=ssh, ssh_port=2223)
    done = rack.fab("up", hosts=hostfile)
    assert done.returncode == 0, done.stdout + done.stderr
    yield hostfile
    rack.fab("down", "--force", hosts=hostfile)


def test_slots_that_another_cluster_uses_are_not_free(rack_up: Up, second: str) -> None:
    rack = rack_up.rack
    run_id = started(rack, "first", "--nodes", "1", **ADA)
    try:
        status = rack.fab("status", hosts=second).stdout
        row = next(line for line in status.splitlines() if run_id in line)
        assert [cell.strip() for cell in row.split("│")[1:-1]] == [
            CLUSTER, run_id, f"ada@{MACHINE}", "host-a: CPU slot 0"
        ]  # fmt: skip
        (other,) = json.loads(rack.fab("status", "--json", hosts=second).stdout)["others"]
        assert (other["cluster"], other["run"]["run_id"], other["devices"]) == (
            CLUSTER, run_id, {"host-a": ["CPU slot 0"]}
        )  # fmt: skip

        done = rack.fab(*sleeping("refused"), *SLEEP, hosts=second, **BOB)
        todo = "wait for it (--queue), have it stopped there, leave its slots out (--exclude), or give --share"
        assert (done.returncode, done.stderr.splitlines()[-1]) == (
            2,
            f"{run_id}: is running on slots that this run would use, in cluster {CLUSTER}; "
            f"got host-a: 0, started by ada@{MACHINE}; {todo}",
        )
        assert not (rack.project / "refused").exists()
        beside = started(rack, "beside", "--include", "host-b", hosts=second)
        # They see each other: what the second has on host-b is not free for the first.
        done = rack.fab(*sleeping("refused"), "--include", "host-b", *SLEEP)
        assert f"{beside}: is running on slots that this run would use, in cluster second; got host-b: 0" in done.stderr
        shared = started(rack, "shared", "--include", "host-a", "--share", hosts=second)
        for name in (beside, shared):
            assert rack.fab("stop", "--run", name, hosts=second).returncode == 0

        command = ("run", "--workdir", "hostfiles", "--queue", "--run-id-file", "queued", "--", "sh", "-c")
        with rack.attached(*command, "echo be''gan; sleep 9999", hosts=second) as terminal:
            said = "waits for CPU slot 0 on host-a, which another run uses"
            wait_until(lambda: said in terminal.text(), "the queued run waits for the device")
            assert "began" not in terminal.text()
            assert rack.fab("stop", "--run", run_id, **ADA).returncode == 0
            wait_until(lambda: "began" in terminal.text(), "the queued program starts")
            queued = run_id_of(rack.project / "queued")
            assert rack.fab("stop", "--run", queued, hosts=second).returncode == 0
            terminal.process.wait(STEP_S)
        assert "other clusters" not in rack.fab("status", hosts=second).stdout
    finally:
        rack.fab("stop", "--run", run_id, "--force")


@pytest.mark.full  # tests/distributed/test_device_locks.py
def test_of_two_launches_at_once_one_goes_on(rack_up: Up, second: str) -> None:
    rack, hosts = rack_up.rack, {"met-1": f"hostfiles/{CLUSTER}", "met-2": second}

    def launched(name: str) -> tuple[int, str]:
        done = rack.fab(*sleeping(name), *SLEEP, hosts=hosts[name], XDG_CACHE_HOME=f"{rack.folder}/{name}-cache")
        return done.returncode, done.stderr

    def active() -> list[str]:
        status = json.loads(rack.fab("status", "--json").stdout)
        others = [other["run"]["run_id"] for other in status["others"]]
        return [run["run_id"] for run in status["runs"] if run["state"] == "running"] + others

    with ThreadPoolExecutor() as pool:
        ended = dict(zip(hosts, pool.map(launched, hosts), strict=True))
    print(ended)
    refused = [said for code, said in ended.values() if code]
    assert [said for said in refused if "is running on slots that this run would use, in cluster " not in said] == []
    run_ids = {name: run_id_of(rack.project / name) for name, (code, _) in ended.items() if code == 0}
    assert run_ids
    try:
        wait_until(lambda: len(active()) < 2, "the other run fails")
        (goes_on,) = active()
        for name, run_id in run_ids.items():
            triage = rack.fab("triage", "--run", run_id, hosts=hosts[name]).stdout
            assert ("devices-taken (docs/triage.md)" in triage) == (run_id != goes_on), triage
    finally:
        for name, run_id in run_ids.items():
            rack.fab("stop", "--run", run_id, hosts=hosts[name])


def test_a_cluster_belongs_to_one_account(rack_up: Up, second: str) -> None:
    """In a folder that both accounts may write to, too: the second would replace the first's nodes and keys."""
    rack = rack_up.rack
    before = [host.sh(f"docker inspect --format '{{{{.Id}}}}' {NODE}") for host in rack]
    ssh = {"config_file": str(rack.folder / "ssh_config"), "user": "other"}
    hostfile = rack.write_cluster("same", name=CLUSTER, ssh=ssh, workdir=WORKDIR)
    for words in (("up",), ("keys", "--rotate"), ("down", "--force"), ("status",)):
        done = rack.fab(*words, hosts=hostfile)
        todo = "use its folder (workdir) or account (ssh.user), or give this cluster another name: rename its hostfile"
        theirs = f"its container {NODE} is not this cluster's; got uid:gid {UID}:{UID}, and yours are 1301:1301"
        assert (done.returncode, done.stderr.splitlines()[-2:]) == (3, [f"{it}: {theirs}; {todo}" for it in HOSTS])
    assert [host.sh(f"docker inspect --format '{{{{.Id}}}}' {NODE}") for host in rack] == before
