"""What a user gets wrong and what a rack does: one clear message each, the right exit code, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.integration.rack import CLUSTER, USER, Rack, Up
from tests.integration.support import execute, succeed, wait_until

RACK = f"hostfiles/{CLUSTER}"
TINY = ("--config", "configs/tiny.yaml")
RUNS = f"/home/{USER}/tridock/{CLUSTER}/workspace/runs"
FINE_A = "host-a: no problem here; fix the others"


def traces(rack: Rack) -> dict[str, object]:
    """Everything that something half-started could leave: containers, processes, temporary files, runs."""
    found: dict[str, object] = {"operator": sorted(path.name for path in rack.temporary.iterdir())}
    # The project's folder is in the environment of every fab of these tests.
    mark = f"PYTHONPATH={rack.project}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[f"process {entry.name}"] = (entry / "cmdline").read_text()
        except OSError:
            continue
    for host in rack:
        # One command: each takes a while, and this is asked twice a test. Docker's own files in /tmp come and go.
        found[host.name] = host.sh(
            f"""docker ps --all --format '{{{{.Names}}}}' | sort
            ls /tmp | grep -v ^runc-process; ls {RUNS}
            find /home/{USER} -name '.put.*' -o -name '.tridock-*' -o -name '*.part'
            pgrep -a -u {USER} -f 'tridock.train|docker load|tar ' || true"""
        )
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(rack_up: Up) -> Iterator[None]:
    rack = rack_up.rack
    before = traces(rack)
    yield

    left: dict[str, object] = {}

    def nothing_is_left() -> bool:  # processes that a command stops need a moment to end
        left.clear()
        left.update({what: found for what, found in traces(rack).items() if before.get(what) != found})
        return not left

    with suppress(AssertionError):
        wait_until(nothing_is_left, "nothing is left")
    assert left == {}, {what: before.get(what) for what in left}


def refused(done: subprocess.CompletedProcess[str], code: int, *lines: str) -> None:
    """The whole of what was said, and the exit code."""
    assert done.stderr.splitlines() == list(lines)
    assert done.returncode == code


def refused_like(done: subprocess.CompletedProcess[str], code: int, *patterns: str) -> None:
    """As :func:`refused`, for a message with numbers that differ each time."""
    lines = done.stderr.splitlines()
    matches = len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))
    assert matches, "\n".join((*lines, "--- expected", *patterns))
    assert done.returncode == code


# ---- the request: refused before any host is contacted -----------------------------------------


def test_a_wrong_key_and_a_wrong_type_in_the_experiment(rack: Rack) -> None:
    text = (rack.project / "configs/tiny.yaml").read_text()
    wrong = text.replace('"num_layers": 1', '"num_layer": 1').replace('"train_iters": 12', '"train_iters": "many"')
    (rack.project / "configs/wrong.yaml").write_text(wrong)
    done = rack.fab("launch", "--config", "configs/wrong.yaml")
    refused(
        done, 2,
        "configs/wrong.yaml: model.num_layers: is missing; add it",
        "configs/wrong.yaml: model.num_layer: is not a field; got 1; did you mean num_layers?",
        "configs/wrong.yaml: train.train_iters: must be a whole number; got 'many'; "
        "write only digits, as in 1000",
    )  # fmt: skip


def test_a_wrong_key_and_a_wrong_type_in_the_settings(rack: Rack) -> None:
    hosts = rack.write_cluster("wrong", imagee="x", ssh_port="2222")
    refused(rack.fab("up", hosts=hosts), 2,
        "hostfiles/wrong.yaml: ssh_port: must be a whole number; got '2222'; write it without quotes or a fraction",
        "hostfiles/wrong.yaml: imagee: is not a field; got 'x'; did you mean image?",
    )  # fmt: skip


def test_a_batch_that_does_not_divide_over_the_ranks(rack: Rack) -> None:
    done = rack.fab("launch", *TINY, "--set", "batch.global_batch_size=12")
    refused(
        done, 2,
        "configs/tiny.yaml: batch.global_batch_size: must be a multiple of micro_batch_size 4 x data parallel size 2; "
        "got 12; use 8 or 16, or leave it out",
    )  # fmt: skip


def test_a_missing_hostfile(rack: Rack) -> None:
    done = rack.fab("launch", *TINY, hosts="hostfiles/nowhere")
    refused(
        done, 2,
        "hostfiles/nowhere: the hostfile is missing; got no such file; give the path of a hostfile; "
        "a run never falls back to this machine alone",
    )  # fmt: skip


def test_an_empty_hostfile(rack: Rack) -> None:
    done = rack.fab("launch", *TINY, hosts=rack.write_cluster("empty", "# nobody\n\n", nodes=None))
    refused(
        done, 2,
        "hostfiles/empty: the hostfile names no node; got no entry; write for example `node-1 slots=8`; "
        "a run never falls back to this machine alone",
    )  # fmt: skip


# ---- ssh ---------------------------------------------------------------------------------------


def test_an_unreachable_host_is_named_and_the_other_one_reported(rack: Rack) -> None:
    nobody = re.sub(r"\d+$", "250", rack["host-a"].address)
    config = Path(rack.write_ssh_config("unreachable"))
    config.write_text(config.read_text().replace(f"HostName {rack['host-b'].address}", f"HostName {nobody}"))
    hosts = rack.write_cluster("unreachable", ssh={"config_file": str(config), "connect_timeout": 8.0})
    for task in ("up", "status"):
        done = rack.fab(task, hosts=hosts)
        refused(
            done, 3,
            f"host-b: does not answer ssh at {nobody} port 22; got No route to host; "
            "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between",
            FINE_A,
        )  # fmt: skip
    # What can be shown is shown; this cluster has brought no node up.
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if "host-" in line]
    assert [(row[1], row[3]) for row in rows] == [("host-a", "none"), ("host-b", "unreachable")]


def test_a_host_without_sshd(rack: Rack) -> None:
    hosts = rack.write_cluster("no-sshd", ssh={"config_file": str(rack.folder / "ssh_config"), "port": 2, "retries": 1})
    line = "host-{}: does not answer ssh at {} port 2; got Connection refused, 2 times; "
    todo = "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between"
    lines = [line.format(name[-1], host.address) + todo for name, host in rack.hosts.items()]
    refused(rack.fab("up", hosts=hosts), 3, *lines)


def keys_of(rack: Rack) -> dict[str, str]:
    return {host.name: host.sh("cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub").strip() for host in rack}


def fingerprint(rack: Rack, host: str) -> str:
    return rack[host].sh("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").split()[1]


def test_a_changed_host_key(rack: Rack) -> None:
    keys = keys_of(rack)
    config = rack.write_ssh_config("changed", {"host-a": keys["host-a"], "host-b": keys["host-a"]})
    done = rack.fab("up", hosts=rack.write_cluster("changed", ssh={"config_file": config}))
    shown, address = fingerprint(rack, "host-b"), rack["host-b"].address
    refused(
        done, 3,
        f"host-b: its host key has changed; got ED25519 key sent by the remote host is {shown}; "
        f"if the host was reinstalled, remove the old key (ssh-keygen -R {address}); "
        "if not, somebody may be in between",
        FINE_A,
    )  # fmt: skip


def test_an_unknown_host_key(rack: Rack) -> None:
    config = rack.write_ssh_config("unknown", {"host-a": keys_of(rack)["host-a"]})
    done = rack.fab("up", hosts=rack.write_cluster("unknown", ssh={"config_file": config}))
    address = rack["host-b"].address
    refused_like(
        done, 3,
        rf"host-b: its host key is not known here; got No ED25519 host key is known for {address}; compare it with "
        rf"the host's own \(ssh-keygen -l\), then take it over: ssh {USER}@{address}",
        re.escape(FINE_A),
    )  # fmt: skip
    assert not (rack.project / ".tridock" / "unknown").exists()


# ---- Docker ------------------------------------------------------------------------------------


def test_docker_does_not_run_on_a_host(rack: Rack) -> None:
    with rack["host-b"].without("/var/run/docker.sock"):
        done = rack.fab("up")
    refused(
        done, 3,
        "host-b: Docker does not answer; got Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
        "Is the docker daemon running?; start Docker there (systemctl start docker); "
        "journalctl -u docker says why it hangs",
        FINE_A,
    )  # fmt: skip


def test_a_host_without_docker(rack: Rack) -> None:
    with rack["host-b"].without("/usr/bin/docker"):
        done = rack.fab("up")
    refused(done, 3, "host-b: has no Docker; got no docker on PATH; install Docker Engine there", FINE_A)


def test_a_user_who_may_not_use_docker(rack: Rack) -> None:
    # Groups hold from the next login on: without the connection that is open.
    rack["host-b"].sh(f"gpasswd --delete {USER} docker; pkill -f '^sshd: {USER}' || :")
    try:
        done = rack.fab("up")
    finally:
        rack["host-b"].sh(f"gpasswd --add {USER} docker")
    refused_like(
        done, 3,
        r"host-b: Docker does not answer; got .*permission denied.*; add the ssh user to the docker group there",
        re.escape(FINE_A),
    )  # fmt: skip


# ---- the image ---------------------------------------------------------------------------------


def test_an_image_that_is_missing_here_and_on_one_node(rack: Rack) -> None:
    image = f"{rack.name}:elsewhere"
    rack["host-a"].sh('docker tag "$1" "$2"', rack.image, image)
    image_id = rack["host-a"].image_id(image)[:19]
    try:
        done = rack.fab("up", hosts=rack.write_cluster("elsewhere", image=image))
    finally:
        rack["host-a"].sh('docker image rm "$1"', image)
    refused(
        done, 3,
        f"{image}: is not on this machine, and not the same on every host; "
        f"got {image_id} on host-a, none on host-b; run tridock image here",
    )  # fmt: skip


def test_nodes_with_different_images_and_none_here(rack: Rack) -> None:
    image = f"{rack.name}:elsewhere"
    for host in rack:
        host.sh('tar -c --files-from /dev/null | docker import --message "$2" - "$1"', image, host.name)
    ids = [host.image_id(image)[:19] for host in rack]
    try:
        done = rack.fab("up", hosts=rack.write_cluster("elsewhere", image=image))
    finally:
        for host in rack:
            host.sh('docker image rm "$1"', image)
    refused(
        done, 3,
        f"{image}: is not on this machine, and not the same on every host; "
        f"got {ids[0]} on host-a, {ids[1]} on host-b; run tridock image here",
    )  # fmt: skip


@pytest.fixture
def small_image(rack: Rack) -> Iterator[str]:
    """An image of which no host has a layer, of a size that travels quickly."""
    image = f"{rack.name}:travels"
    file = rack.folder / "travels"
    file.write_bytes(os.urandom(4 << 20))
    succeed("sh", "-c", f"tar -c -C {rack.folder} travels | docker import - {image}")
    yield image
    succeed("docker", "image", "rm", image)
    for host in rack:
        host.execute('docker image rm "$1"', image)


def test_no_space_left_for_the_image_on_this_machine(rack: Rack, small_image: str) -> None:
    folder = rack.folder / "small-disk"
    folder.mkdir(exist_ok=True)
    with small_disk_here(folder):
        done = rack.fab("up", hosts=rack.write_cluster("travels", image=small_image), XDG_CACHE_HOME=str(folder))
    refused_like(
        done, 3,
        rf"docker push {re.escape(small_image)}: could not be written to a file; "
        rf"got .*No space left on device.*, 0.0 GB free in {folder}/tridock/layers/\w+; "
        r"free some space there, or set XDG_CACHE_HOME to a larger disk",
    )  # fmt: skip


@contextmanager
def small_disk_here(folder: Path) -> Iterator[None]:
    if execute("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)).returncode:
        pytest.skip("a disk of one megabyte is mounted for it, which takes root")
    try:
        yield
    finally:
        succeed("umount", str(folder))


def test_no_space_left_for_the_image_on_a_host(rack: Rack, small_image: str) -> None:
    hosts = rack.write_cluster("travels", image=small_image)
    with rack["host-b"].small_disk("/var/lib/docker/tmp", "1m"):
        done = rack.fab("up", hosts=hosts)
    refused_like(
        done, 3,
        r"host-b: docker pull failed; got .*: no space left on device; "
        r"free some space there \(docker system df shows Docker's share; df -i the inodes\)",
        re.escape(FINE_A),
    )  # fmt: skip


# ---- space and ports ---------------------------------------------------------------------------


def test_no_space_left_for_a_nodes_files(rack: Rack) -> None:
    hosts = rack.write_cluster("full", workdir="/mnt/full")
    rack["host-a"].sh(f"install -d -o {USER} /mnt/full")
    with rack["host-b"].small_disk("/mnt/full", "64k", filled=True):
        done = rack.fab("up", hosts=hosts)
        left = rack["host-b"].sh("find /mnt/full -type f ! -name 'nodes.lock*'").split()
    rack["host-a"].sh("rm -rf /mnt/full")
    assert left == ["/mnt/full/filler"]
    refused_like(
        done, 3,
        r"host-b: `claim the node` failed with exit code \d+; got .*No space left on device.*; "
        r"free some space there \(docker system df shows Docker's share; df -i the inodes\)",
    )  # fmt: skip


def test_the_nodes_port_is_taken_on_a_host(rack: Rack) -> None:
    """By the other cluster's node: two clusters on a host need two ports."""
    done = rack.fab("up", "--include", "host-b", hosts=rack.write_cluster("second"))
    refused(
        done, 3,
        "host-b: sshd cannot listen on 0.0.0.0 port 2222; got Address already in use; stop what listens there "
        "('ss -ltnp' on the host shows it), or change the cluster's ssh port or listen address",
    )  # fmt: skip


def test_the_rendezvous_port_is_taken_on_the_head(rack: Rack) -> None:
    listen = "import socket, time; s = socket.create_server(('', 23456)); time.sleep(9999)"
    rack["host-a"].sh(f'docker exec --detach --user 1234 tridock-{CLUSTER} python -c "{listen}"')
    pid: list[str] = []

    def listens() -> bool:
        pid[:] = rack["host-a"].execute(f"docker exec tridock-{CLUSTER} pgrep -f create_server").stdout.split()
        return bool(pid) and "5BA0" in rack["host-a"].sh("cat /proc/net/tcp")

    wait_until(listens, "the port is taken")
    try:
        done = rack.fab("launch", *TINY, "--set", "launch.master_port=23456")
    finally:
        rack["host-a"].sh(f"docker exec tridock-{CLUSTER} pkill -f create_server")
    refused(
        done, 3,
        "configs/tiny.yaml: launch.master_port: port 23456 is taken on host-a; "
        f"got python (pid {pid[0]}); change it or leave it out",
    )  # fmt: skip


# ---- data --------------------------------------------------------------------------------------


def test_data_that_is_missing_on_one_node(rack: Rack) -> None:
    with rack["host-b"].without(f"/home/{USER}/tridock/{CLUSTER}/workspace/data/tiny/text_document.idx"):
        done = rack.fab("launch", *TINY)
    refused(
        done, 2,
        "configs/tiny.yaml: data.data_path: is not on node host-b; got data/tiny/text_document.idx; "
        "copy the data to the nodes: tridock data sync --hosts hostfiles/rack --path data/tiny/text_document",
    )  # fmt: skip


def test_data_that_differ_on_one_node(rack: Rack) -> None:
    index = f"/home/{USER}/tridock/{CLUSTER}/workspace/data/tiny/text_document.idx"
    digest = rack["host-b"].sh("printf other | sha256sum | cut -d' ' -f1").strip()
    with rack["host-b"].without(index):
        rack["host-b"].sh('printf other >"$1"', index)
        done = rack.fab("launch", *TINY)
    refused(
        done, 2,
        "configs/tiny.yaml: data.data_path: has different content on node host-b than on the head; "
        f"got {digest}  data/tiny/text_document.idx; "
        "copy the data to the nodes: "
        "tridock data sync --hosts hostfiles/rack --path data/tiny/text_document --checksum",
    )  # fmt: skip


def test_no_space_left_for_a_runs_folder(rack: Rack) -> None:
    with rack["host-b"].small_disk("/workspace/runs", "64k", filled=True, node=f"tridock-{CLUSTER}"):
        done = rack.fab("launch", *TINY)
    refused_like(
        done, 3,
        r"host-b: has less than 268.4 MB of disk space for a run's files; got 0 kB of 66 kB free; "
        r"free some space there \(docker system df shows Docker's share\)",
    )  # fmt: skip


# ---- the twin, without an engine ---------------------------------------------------------------


def test_the_twin_without_a_running_docker(rack: Rack) -> None:
    done = rack.fab("launch", hosts="hostfiles/twin", DOCKER_HOST="unix:///nowhere.sock")
    refused(
        done, 3,
        "this machine: Docker does not answer; got Cannot connect to the Docker daemon at unix:///nowhere.sock. "
        "Is the docker daemon running?; start Docker there (systemctl start docker); "
        "journalctl -u docker says why it hangs",
    )  # fmt: skip


def test_the_twin_without_docker(rack: Rack) -> None:
    programs = rack.folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("sh", "bash", "ssh", "git", "id", "tail", "python3"):
        found = shutil.which(name)
        assert found is not None
        if not (programs / name).exists():
            (programs / name).symlink_to(found)
    done = rack.fab("up", hosts="hostfiles/twin", PATH=str(programs))
    refused(done, 3, "this machine: has no Docker; got no docker on PATH; install Docker Engine there")
