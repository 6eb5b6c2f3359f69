"""`tridock check` on two Docker hosts: fit, and with everything wrong that can be provoked for real."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.rack import CLUSTER, UID, USER, WORKDIR, Rack, RackHost, Up
from tests.integration.support import succeed, wait_until

NODE = f"tridock-{CLUSTER}"
TINY = ("--config", "configs/tiny.yaml")
DEAD_RUN = "dead-20260102-030405-abcd"

# What a program in a node believes to be the time: a container cannot set the clock, which is its host's.
SHIFT = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 45;
    return code;
}
"""


pytestmark = pytest.mark.usefixtures("rack_up")


def checked(rack: Rack, *arguments: str, hosts: str = f"hostfiles/{CLUSTER}") -> tuple[int, dict[str, Any]]:
    """The exit code and the report of `tridock check`."""
    done = rack.fab("check", "--json", *arguments, hosts=hosts)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(f"fab check {' '.join(arguments)}: {report['seconds']} s")
    return done.returncode, report


def problems_of(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """The findings by node and what is wrong."""
    return {(finding["node"], finding["what"]): finding for finding in report["findings"]}


def leftovers(host: RackHost, workdir: str = WORKDIR) -> str:
    found = f"find {workdir}/workspace -name '.tridock-*' ! -name .tridock-sync.lock"  # which tridock data keeps
    return host.execute(f"{found}; pgrep -af '[t]ridock.node|[a]llreduce' || :").stdout


def test_two_healthy_hosts_are_fit_and_nothing_is_left_behind(rack: Rack) -> None:
    code, report = checked(rack, *TINY)
    assert (code, report["findings"]) == (0, [])
    seen = report["seen"]
    assert seen["hosts"] == "2 of 2 answer"
    assert seen["ssh"] == f"host-a's ssh reaches 2 nodes of {CLUSTER}"
    assert seen["space"].endswith("; /workspace/runs is local to each")
    assert seen["network"] == f"gloo: eth0 {rack['host-a'].address} on host-a"
    assert seen["data"].startswith("data/tiny/text_document is the same everywhere; port ")
    assert re.fullmatch(r"2 ranks, Gloo, 8 MB: \d+\.\d\d GB/s", seen["all-reduce"])
    for host in rack:
        wait_until(lambda host=host: leftovers(host) == "", f"nothing is left on {host.name}")


# ---- one fault after the other on nodes that are up ----------------------------------------------


@contextmanager
def listener(rack: Rack, port: int) -> Iterator[None]:
    """Somebody who listens on a port of the head."""
    program = f"import socket,time; s=socket.create_server(('',{port})); print('on',flush=True); time.sleep(9999)"
    inside = ["docker", "exec", "--user", f"{UID}:{UID}", NODE, "python", "-c", program]
    argv = ["docker", "exec", rack["host-a"].container, *inside]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"on\n"
            yield
        finally:
            rack["host-a"].execute("pkill -f [c]reate_server")
            process.kill()


def test_a_wrong_host_key_and_a_port_that_is_taken_are_named_and_the_key_is_mended(rack: Rack) -> None:
    host = rack["host-b"]
    host.sh(
        'rm -f /tmp/k*; ssh-keygen -q -t ed25519 -N "" -f /tmp/k; cat /tmp/k >"$1"; cat /tmp/k.pub >"$1.pub"; '
        f'docker exec {NODE} sh -c "kill -HUP \\$(cat /run/tridock/state/sshd.pid)"',
        f"{WORKDIR}/secrets/host-b/ssh_host_ed25519_key",
    )  # fmt: skip
    shown = host.sh("ssh-keygen -l -f /tmp/k.pub | cut -d' ' -f2").strip()
    with listener(rack, 23456):
        code, report = checked(rack, *TINY, "--set", "launch.master_port=23456")
    assert code == 3
    assert {finding["node"] for finding in report["findings"]} == {"host-b", "configs/tiny.yaml: launch.master_port"}
    taken = problems_of(report)["configs/tiny.yaml: launch.master_port", "port 23456 is taken on host-a"]
    assert re.fullmatch(r"python \(pid \d+\)", taken["got"])
    assert taken["todo"] == "change it or leave it out"
    assert "all-reduce" not in report["seen"]
    found = problems_of(report)["host-b", "shows another host key than the head has on file"]
    assert found["got"] == shown
    assert found["todo"] == f"give all nodes the cluster's keys again: tridock keys --hosts hostfiles/{CLUSTER}"
    done = rack.fab("check", "--fix")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "fixed: give all nodes the cluster's keys again\n"
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    assert ["hosts", "ok", "2 of 2 answer"] in rows
    assert re.fullmatch(r"cluster rack: fit, 2 nodes \(\d+\.\d s\)", done.stdout.splitlines()[-1])


def test_a_node_that_is_down_and_what_a_dead_run_left_are_mended(rack: Rack) -> None:
    folder = f"{WORKDIR}/workspace/runs/{DEAD_RUN}"
    rack["host-a"].sh(f"install -d -o {USER} {folder} && echo 4 >{folder}/exit_code")
    rack["host-a"].sh(f"docker exec -d --user {UID}:{UID} --env TRIDOCK_RUN_ID={DEAD_RUN} {NODE} sleep 9999")
    rack["host-b"].sh(f"docker kill {NODE}")
    try:
        code, report = checked(rack)
        assert code == 3
        stopped, left = report["findings"]
        assert (stopped["node"], stopped["what"]) == ("host-b", "its node is not running")
        assert (left["node"], left["what"]) == ("host-a", "has processes of a run that is failed")
        assert left["got"] == DEAD_RUN
        done = rack.fab("check", "--fix")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr.splitlines() == [
            f"fixed: end the leftover processes of run {DEAD_RUN}",
            "fixed: bring the nodes up: keys, image, containers",
        ]
        assert rack["host-a"].processes(DEAD_RUN) == []
        assert rack["host-b"].containers() == {NODE: "running"}
    finally:
        rack["host-a"].sh(f"rm -rf {folder}")


@pytest.mark.full  # tests/unit/ops/checks/test_network.py
def test_a_firewall_and_debians_line_for_a_hosts_own_name(rack: Rack) -> None:
    """The line in the head's node, the firewall before the other one; ssh goes through it."""
    inside = f"docker exec --user 0 {NODE} sh -c"
    rule = "iptables $1 INPUT -i eth0 -p tcp -m multiport ! --dports 22,2222 -m state --state NEW -j DROP"
    line = "cp /etc/hosts /tmp/hosts; { echo 127.0.1.1 host-a; grep -v host-a /tmp/hosts; } >/etc/hosts"
    rack["host-a"].sh(f'{inside} "{line}"')
    rack["host-b"].sh(rule, "-A")
    try:
        code, report = checked(rack)
        launched = rack.fab("launch", *TINY)  # which says it too, before anything is written
    finally:
        rack["host-b"].sh(rule, "-D")
        rack["host-a"].sh(f'{inside} "cat /tmp/hosts >/etc/hosts"')
    assert code == 3
    address = rack["host-b"].address
    found = {(it["node"], it["what"]): it["got"] for it in report["findings"]}
    assert found == {
        ("host-a", "Gloo would use an interface of its own"): "lo, 127.0.1.1 (its host name leads there)",
        ("host-b", f"is not reached by any other node at {address}"): "no answer within 3 s",
    }
    assert (launched.returncode, launched.stderr) == (
        3,
        "host-a: Gloo would use an interface of its own; got lo, 127.0.1.1 (its host name leads there); set "
        "GLOO_SOCKET_IFNAME: eth0 for it (nodes.host-a.env in the settings), then tridock up\n",
    )


# ---- clusters that are wrong from their start ----------------------------------------------------


@contextmanager
def cluster(rack: Rack, name: str, **settings: Any) -> Iterator[str]:
    """A cluster of its own on the rack's hosts, taken down and forgotten at the end."""
    hosts = rack.write_cluster(name, "host-a slots=2\nhost-b slots=2\n", **settings)
    done = rack.fab("up", hosts=hosts)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        yield hosts
    finally:
        rack.fab("down", "--force", hosts=hosts)
        for suffix in ("", ".yaml"):
            (rack.project / f"{hosts}{suffix}").unlink()


@pytest.mark.full  # tests/unit/ops/checks
def test_an_sshd_of_the_hosts_own_on_the_nodes_port_stops_a_launch_before_it_writes(rack: Rack) -> None:
    """Host-b's node listens where only itself hears it; at the address that others call, the host's own sshd does."""
    host = rack["host-b"]
    nodes = {it.name: {"address": it.address} for it in rack} | {
        "host-b": {"address": host.address, "listen": ["127.0.0.1"]}
    }
    container = {"gpus": "none", "ulimits": {}, "ipc": "private", "shm_size": "1g"}
    with cluster(rack, "shadow", nodes=nodes, ssh_port=2225, container=container) as hosts:
        host.sh(f"/usr/sbin/sshd -p 2225 -o ListenAddress={host.address} -o PidFile=/run/second-sshd.pid")
        try:
            code, report = checked(rack, *TINY, hosts=hosts)
            launched = rack.fab("launch", *TINY, hosts=hosts)
        finally:
            host.sh("kill $(cat /run/second-sshd.pid)")
        assert code == 3
        what = f"an sshd that is not the node's answers at {host.address} port 2225"
        found, *data = report["findings"]
        assert (found["node"], found["what"]) == ("host-b", what)
        # Nobody has brought any data to this cluster.
        assert [it["what"] for it in data] == ["is not on node host-a", "is not on node host-b"]
        assert found["got"] == "host key " + host.sh("ssh-keygen -l -f /etc/ssh/ssh_host_ed25519_key").split()[1]
        assert launched.returncode == 3
        assert launched.stderr.startswith(f"host-b: {what}; got host key SHA256:")
        assert all(it.sh(f"ls /home/{USER}/tridock/shadow/workspace/runs") == "" for it in rack)
        # Who insists may continue, and finds out.
        assert "--no-check" in rack.fab("launch", "--help", hosts="").stdout


@pytest.fixture(scope="module")
def sick(rack_up: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The report on a cluster with much that is wrong: image and settings changed before host-b came up again."""
    rack, folder = rack_up.rack, tmp_path_factory.mktemp("shift")
    (folder / "shift.c").write_text(SHIFT)
    succeed("gcc", "-shared", "-fPIC", "-o", str(folder / "shift.so"), str(folder / "shift.c"))
    image, work = f"{rack.name}:sick", f"/home/{USER}/tridock/sick"
    data = f"{work}/workspace/data"
    for host in rack:
        host.sh(f"mkdir -p {data} {work}/workspace/runs && cp -r {WORKDIR}/workspace/data/tiny {data}")
        host.sh(f"chown -R {USER}: {work}")
        host.sh(f"mkdir -p /opt/shift && docker tag {rack.image} {image}")
        succeed("docker", "cp", str(folder / "shift.so"), f"{host.container}:/opt/shift/shift.so")
    own = {"LD_PRELOAD": "/opt/shift/shift.so", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = {host.name: {"address": host.address} for host in rack}
    settings: dict[str, Any] = {
        "image": image,
        "ssh_port": 2226,
        "container": {"gpus": "none", "ulimits": {}, "ipc": "private", "mounts": ["/opt/shift:/opt/shift:ro"]},
        "nodes": nodes | {"host-b": nodes["host-b"] | {"env": own}},
    }
    rack["host-b"].sh(f"printf other >{data}/tiny/text_document.idx")
    change = "docker exec --user 0 tridock-sick sh -c 'echo >>/opt/tridock/entrypoint/profile.sh'"
    try:
        with (
            rack["host-a"].small_disk(f"{work}/workspace/runs", "64k", filled=True),
            cluster(rack, "sick", env={"OMP_NUM_THREADS": "1"}, **settings) as hosts,
        ):
            rack["host-b"].sh(f"{change} && docker commit tridock-sick {image}")
            again = rack.write_cluster(
                "sick", "host-a slots=2\nhost-b slots=2\n", env={"OMP_NUM_THREADS": "2", "HF_TOKEN": "hf_abc"},
                **settings,
            )  # fmt: skip
            assert rack.fab("up", "--include", "host-b", hosts=again).returncode == 0
            code, report = checked(rack, *TINY, hosts=hosts)
            yield {"code": code, "report": report}
    finally:
        for host in rack:
            host.execute(f'docker image rm "$1"; rm -rf /opt/shift {work}', image)


def test_everything_that_is_wrong_is_said_at_once(rack: Rack, sick: dict[str, Any]) -> None:
    found = problems_of(sick["report"])
    assert sick["code"] == 3
    small = "has less than 1.1 GB of /dev/shm for 2 ranks"
    expected = {
        ("host-a", small): "fail",
        ("host-b", small): "fail",
        ("host-a", "has less than 268.4 MB of disk space for a run's files"): "fail",
        ("host-b", "runs a different image than the head"): "fail",
        ("host-b", "has different code in /opt/tridock than the head"): "fail",
        ("host-b", "its environment differs from the head's"): "fail",
        ("host-b", "its clock is ahead of the others'"): "fail",
        ("host-b", "Gloo would use an interface of its own"): "fail",
        ("configs/tiny.yaml: data.data_path", "has different content on node host-b than on the head"): "fail",
    }
    assert expected.items() <= {key: finding["severity"] for key, finding in found.items()}.items()
    others = {key: finding for key, finding in found.items() if key not in expected}
    assert {finding["severity"] for finding in others.values()} <= {"warn"}, others
    assert all(finding["why"] and finding["todo"] for finding in found.values())


def test_the_values_that_were_seen(rack: Rack, sick: dict[str, Any]) -> None:
    found = problems_of(sick["report"])
    assert found["host-b", "has less than 1.1 GB of /dev/shm for 2 ranks"]["got"] == "67.1 MB"
    assert re.fullmatch(r"4[45]\.\d s", found["host-b", "its clock is ahead of the others'"]["got"])
    assert found["host-b", "Gloo would use an interface of its own"]["got"] == (
        "lo, 127.0.0.1 (GLOO_SOCKET_IFNAME says so)"
    )
    assert found["host-b", "Gloo would use an interface of its own"]["todo"] == (
        "set GLOO_SOCKET_IFNAME: eth0 for it (nodes.host-b.env in the settings), then tridock up"
    )


def test_variables_are_named_and_secrets_are_not_shown(rack: Rack, sick: dict[str, Any]) -> None:
    got = problems_of(sick["report"])["host-b", "its environment differs from the head's"]["got"]
    assert re.fullmatch(r"HF_TOKEN=\(secret [0-9a-f]{12}\), not set on host-a; OMP_NUM_THREADS=2, 1 on host-a", got)
    assert "hf_abc" not in json.dumps(sick["report"])


def test_a_host_that_is_away_does_not_hide_the_other(rack: Rack) -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIJf9ZpY0ygW1XJHn1k4l8s3zZ7ZQbX4yxPqQ9y9K1Qx"
    known = {host.name: host.sh("cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub").strip() for host in rack}
    config = rack.write_ssh_config("ssh_config_away", {**known, "host-b": key})
    rack.write_cluster(CLUSTER, ssh={"config_file": config, "retries": 0})
    try:
        code, report = checked(rack)
    finally:
        rack.write_cluster(CLUSTER)
    assert code == 3
    assert [(it["check"], it["node"]) for it in report["findings"] if it["severity"] == "fail"] == [("hosts", "host-b")]
    assert report["seen"]["ssh"] == f"host-a's ssh reaches 1 node of {CLUSTER}"
