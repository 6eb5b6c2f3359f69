"""Two Docker hosts, reached over ssh as in a rack: their nodes, from `fab up` to `fab down`, in that order."""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import ExitStack

import pytest

from tests.integration.rack import CLUSTER, UID, USER, WORKDIR, Up
from tests.integration.rack_runs import (
    HOSTS,
    NODE,
    RUNS,
    SLEEP,
    TINY,
    every_node_reaches_every_node,
    run_id_of,
    secret_lines,
    sleeping,
)
from tests.integration.registry import Registry
from tests.integration.support import execute, succeed, wait_until
from tridock.cluster.settings import load_cluster
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.ensure import prune

# ---- up ------------------------------------------------------------------------------------------


def test_up_brings_the_image_and_one_node_to_each_host(rack_up: Up) -> None:
    rack = rack_up.rack
    print(f"the first fab up took {rack_up.seconds:.0f} s")
    wanted = succeed("docker", "image", "inspect", "--format", "{{.Id}}", rack.image).strip()
    assert [host.image_id(rack.image) for host in rack] == [wanted, wanted]
    assert [host.containers() for host in rack] == [{NODE: "running"}, {NODE: "running"}]
    assert all(f"{name}: got " in rack_up.output for name in HOSTS)
    assert rack_up.output.splitlines()[-1] == f"2 nodes up, image {wanted[:19]}: host-a, host-b"


def test_the_second_up_sends_nothing_and_leaves_the_nodes_alone(rack_up: Up) -> None:
    rack = rack_up.rack
    inspect = f"docker inspect --format '{{{{.Id}}}} {{{{.State.StartedAt}}}}' {NODE}"
    before = [host.sh(inspect) for host in rack]
    done = rack.fab("up")
    assert (done.returncode, done.stdout.splitlines()) == (0, [rack_up.output.splitlines()[-1]])
    assert [
        host.sh(f"docker inspect --format '{{{{.Id}}}} {{{{.State.StartedAt}}}}' {NODE}") for host in rack
    ] == before


def test_a_nodes_container_is_as_the_settings_say_and_listens_for_the_others(rack_up: Up) -> None:
    for host in rack_up.rack:
        config = json.loads(host.sh(f"docker inspect {NODE}"))[0]
        assert (config["HostConfig"]["NetworkMode"], config["HostConfig"]["IpcMode"]) == ("host", "host")
        assert config["HostConfig"]["Privileged"] is False
        owners = host.sh(f"docker exec {NODE} ps -eo uid=,comm=").splitlines()
        assert [int(line.split()[0]) for line in owners if "sshd" in line] == [UID]


def test_every_node_reaches_every_node_without_a_password(rack_up: Up) -> None:
    every_node_reaches_every_node(rack_up.rack)


def test_keys_are_the_operators_alone(rack_up: Up) -> None:
    rack = rack_up.rack
    here = rack.project / ".tridock"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (here, *here.rglob("*")) if path.is_dir()} == {0o700}
    files = {stat.S_IMODE(path.stat().st_mode) for path in (here / CLUSTER).rglob("*") if path.is_file()}
    assert files == {0o600}
    for host in rack:
        listed = host.sh(f"cd {WORKDIR}/secrets && find {host.name} -printf '%y %m %u\n' | sort -u")
        assert listed == f"d 700 {USER}\nf 600 {USER}\n"


def test_keys_are_made_once(rack_up: Up) -> None:
    rack = rack_up.rack
    before = secret_lines(rack)
    first, second = rack.fab("keys"), rack.fab("keys")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert re.fullmatch(r"keys of 2 nodes in place; client key SHA256:\S{43}\n", first.stdout)
    assert set(secret_lines(rack)) == set(before)


@pytest.mark.full  # test_image_on_hosts.py
def test_an_image_goes_only_to_the_host_that_lacks_it(rack_up: Up) -> None:
    """A small one, which is no image of ours: the hosts' own engines say so, and nothing stays behind."""
    rack = rack_up.rack
    small = f"{rack.name}:small"
    succeed("docker", "tag", "debian:bookworm-slim", small)
    try:
        succeed("bash", "-c", f"docker save {small} | docker exec -i {rack['host-a'].container} docker load")
        done = rack.fab("up", hosts=rack.write_cluster("small", image=small))
        # An edit: a layer above the one that both have now.
        folder = rack.folder / "edit"
        folder.mkdir()
        (folder / "Dockerfile").write_text(f"FROM {small}\nCOPY Dockerfile /edit\n")
        succeed("docker", "build", "--quiet", "--tag", small, str(folder))
        edited = rack.fab("up", hosts="hostfiles/small")
        wanted = succeed("docker", "image", "inspect", "--format", "{{.Id}}", small).strip()
        assert [host.image_id(small) for host in rack] == [wanted, wanted]
    finally:
        succeed("docker", "image", "rm", small)
    assert done.returncode == 3, done.stdout + done.stderr
    # It is the base of the nodes' image: host-b has its layer.
    assert "host-b: got 0 layers " in done.stdout
    assert "host-a: got " not in done.stdout
    assert [f"{name}: got 1 layer of " in edited.stdout for name in HOSTS] == [True, True], edited.stderr
    assert len({host.image_id(small) for host in rack} - {""}) == 1
    text = r"\[FATAL tini \(\d+\)\] exec node failed: No such file or directory"
    said = f"its node ended at once; got {text}; fix that, then run tridock up again"
    for host in rack:
        host.sh('docker image rm "$1"', small)
    assert re.fullmatch(f"host-a: {said}\nhost-b: {said}\n", done.stderr), done.stderr
    assert [host.containers() for host in rack] == [{NODE: "running"}, {NODE: "running"}]


def test_what_a_registry_has_is_pulled_and_older_images_go_when_asked(rack_up: Up) -> None:
    """The base by host-a, which reaches its registry; the whole image by both from the cluster's own registry."""
    rack = rack_up.rack
    image, folder = f"{rack.name}:pulled", rack.folder / "pulled"
    (folder / "blobs").mkdir(parents=True)

    def build(base: str) -> str:
        (folder / "code").write_bytes(os.urandom(1000))
        (folder / "Dockerfile").write_text(f"FROM {base}\nCOPY code /code\n")
        return succeed("docker", "build", "--quiet", "--tag", image, str(folder)).strip()

    with Registry(folder / "blobs") as registry, ExitStack() as tunnels:
        tunnels.enter_context(registry.seen_on(rack.folder / "ssh_config", "host-a"))
        base = f"{registry.address}/team/base:1"
        (folder / "code").write_bytes(os.urandom(1_000_000))
        try:
            succeed("sh", "-c", f"tar -c -C {folder} code | docker import - {base} && docker push {base}")
            first = build(base)
            done = rack.fab("up", hosts=rack.write_cluster("pulled", image=image))
            assert "host-a: got 1 layer of " in done.stdout, done.stderr
            assert "host-b: got 2 layers of " in done.stdout, done.stderr
            assert re.search(r"host-b: gets the base image from here, it cannot pull it: .*refused", done.stderr)
            assert 1_000_000 < registry.pulled < 1_010_000
            tunnels.enter_context(registry.seen_on(rack.folder / "ssh_config", "host-b"))
            second = build(base)
            rack.fab("up", hosts=rack.write_cluster("pulled", image=image, registry=f"{registry.address}/team"))
            assert [host.image_id(image) for host in rack] == [second, second]
            for _, pruned in sorted(prune(Hosts(load_cluster(rack.project / "hostfiles/pulled"))).items()):
                assert (pruned.removed, pruned.kept) == ((first,), ())
            assert [host.image_id(first) for host in rack] == ["", ""]
            assert [host.containers() for host in rack] == [{NODE: "running"}, {NODE: "running"}]
        finally:
            execute("docker", "image", "rm", image, base, f"{registry.address}/team/{rack.name}:pulled")
            for host in rack:
                host.execute('docker image rm --force $(docker image inspect --format "{{.Id}}" "$1")', image)
                host.execute('docker image rm $(docker image ls --quiet "$1")', base.rpartition(":")[0])


# ---- what is not ours ----------------------------------------------------------------------------


def test_a_container_that_tridock_did_not_start_is_left_alone(rack_up: Up) -> None:
    rack = rack_up.rack
    other, host = rack.write_cluster("foreign"), rack["host-b"]
    try:
        host.sh(f"docker run --detach --network none --name tridock-foreign {rack.image} sleep 9999")
        before = host.sh("docker inspect --format '{{.Id}}' tridock-foreign")
        for task in ("up", "down"):
            done = rack.fab(task, hosts=other)
            assert done.returncode == 3
            assert done.stderr.splitlines()[0] == (
                f"host-b: its container tridock-foreign is not this cluster's; got one of {rack.image}, which Tridock "
                "did not start; use its folder (workdir) or account (ssh.user), or give this cluster another name: "
                "rename its hostfile"
            )
        assert host.sh("docker inspect --format '{{.Id}}' tridock-foreign") == before
        assert "tridock-foreign" not in rack["host-a"].containers()
    finally:
        host.sh("docker rm --force tridock-foreign")


# ---- some of the nodes, none of the nodes --------------------------------------------------------


def test_a_node_that_is_gone_shows_in_status_and_a_launch_brings_it_back(rack_up: Up) -> None:
    rack = rack_up.rack
    rack["host-b"].sh(f"docker kill {NODE}")
    shown = rack.fab("status")
    assert shown.returncode == 0, shown.stderr
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.stdout.splitlines() if "│" in line]
    image = rack["host-a"].image_id(rack.image).removeprefix("sha256:")[:12]
    assert ["host-a", "1", "running", image] in rows
    assert ["host-b", "1", "exited 137", image] in rows
    assert "runs" in shown.stdout  # those of the node that is up

    done = rack.fab("launch", *TINY, "--include", "host-b", "--run-id-file", "alone")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(rack.project / "alone")
    assert f"run {run_id}: 1 rank on 1 node" in done.stdout
    assert rack["host-b"].containers() == {NODE: "running"}
    assert rack["host-b"].sh(f"cat {RUNS}/{run_id}/exit_code") == "0\n"
    assert rack["host-a"].execute(f"ls {RUNS}/{run_id}").returncode != 0
    # The run is found on the node that led it, whatever the filters of the next command.
    assert f"run {run_id} is done; its folder is host-b:{RUNS}/{run_id}" in rack.fab("logs", "--run", run_id).stdout
    assert rack.fab("logs", "--run", run_id, "--rank", "0").stdout.count("iteration") >= 12
    fetched = rack.fab("fetch", "--run", run_id)
    assert fetched.returncode == 0, fetched.stderr
    assert (rack.project / "runs" / run_id / "logs" / "rank-0.log").exists()


@pytest.mark.full  # the one above stops one too
def test_a_run_is_stopped_and_looked_at_where_nodes_are_left(rack_up: Up) -> None:
    rack = rack_up.rack
    done = rack.fab(*sleeping("torn"), *SLEEP)
    assert done.returncode == 0, done.stderr
    run_id = run_id_of(rack.project / "torn")
    wait_until(lambda: all(host.processes(run_id, "^sleep ") for host in rack), "it runs")
    rack["host-b"].sh(f"docker kill {NODE}")
    stopped = rack.fab("stop", "--run", run_id)
    assert stopped.stdout == f"stopped {run_id} on host-a\n", stopped.stderr
    assert rack["host-a"].processes(run_id) == []
    assert rack.fab("logs", "--run", run_id).returncode == 4
    assert rack.fab("up").returncode == 0


# ---- down ----------------------------------------------------------------------------------------


def test_down_removes_nodes_and_keys_and_leaves_data_and_runs(rack_up: Up) -> None:
    rack = rack_up.rack
    for host in rack:
        host.sh(f"install -d -o {USER} {RUNS} {RUNS}/kept")
    done = rack.fab("down")
    assert (done.returncode, done.stdout) == (0, "removed host-a, host-b\n"), done.stderr
    for host in rack:
        assert host.containers() == {}
        assert host.execute(f"ls {WORKDIR}/secrets/{host.name}").returncode != 0
        assert host.sh(f"ls {WORKDIR}/workspace/data/tiny").split() == ["text_document.bin", "text_document.idx"]
        host.sh(f"rmdir {RUNS}/kept")
    again = rack.fab("down")
    assert (again.returncode, again.stdout) == (0, "no node was up\n")
    up = rack.fab("up", "--exclude", "host-a")
    assert up.returncode == 0, up.stderr
    assert [list(host.containers()) for host in rack] == [[], [NODE]]
    assert rack.fab("up").returncode == 0  # as the other modules expect it
