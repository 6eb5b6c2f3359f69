"""`fab data` on two Docker hosts over ssh, whose nodes it brings up: what goes where, and what happens meanwhile."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.rack import SHARED, UID, USER, Rack
from tests.integration.support import execute, wait_until

NAME = "sync"
HOSTS = f"hostfiles/{NAME}"
WORKSPACE = f"/home/{USER}/tridock/{NAME}/workspace"
SIZE = 6_000_000
PORT = 2230
"""Another than that of the hosts' other clusters."""
CONTAINER = {"gpus": "none", "ulimits": {}, "mounts": [f"{SHARED}:{SHARED}"]}
LOCK = ".tridock-sync.lock"
FILES = {"x.bin": SIZE, "x.idx": 1000, "x.json": 2}


@pytest.fixture(scope="module", autouse=True)
def data(rack: Rack) -> Iterator[Path]:
    """A data set of the operator's, and a cluster that has no node; its containers see the hosts' common disk."""
    rack.write_cluster(NAME, ssh_port=PORT, container=CONTAINER)
    folder = rack.project / "data" / "sync"
    folder.mkdir(parents=True)
    for name, size in FILES.items():
        (folder / name).write_bytes(b"{}" if name.endswith(".json") else os.urandom(size))
    yield folder
    rack.fab("down", "--force", hosts=HOSTS)  # other tests count the hosts' nodes


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Of each node: files sent, files there, megabytes, and what the last cell says."""
    lines = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cells[number].strip() for number in (1, 2, 3, 6)] for cells in lines}


def bring(rack: Rack, *arguments: str, hosts: str = HOSTS) -> dict[str, list[str]]:
    done = rack.fab("data", *(arguments or ("--path", "data/sync/x")), hosts=hosts)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(done)


def listed(rack: Rack, host: str, folder: str = f"{WORKSPACE}/data/sync") -> list[str]:
    return [name for name in rack[host].sh('ls -A "$1"', folder).split() if name != LOCK]


def digests(rack: Rack, host: str, folder: str = f"{WORKSPACE}/data/sync") -> str:
    return rack[host].sh('cd "$1" && sha256sum *', folder)


def expected(data: Path, *names: str) -> str:
    return "".join(execute("sha256sum", name, cwd=data).stdout for name in names or FILES)


def in_node(rack: Rack, script: str, host: str = "host-b") -> None:
    """Runs a script on a host as root, in the file system of its node."""
    rack[host].sh(f"nsenter -m -t $(docker inspect --format '{{{{.State.Pid}}}}' tridock-{NAME}) sh -c \"$1\"", script)


@contextmanager
def small_disk(rack: Rack, name: str) -> Iterator[str]:
    """While a folder of host-b's node is a disk of 2 MB; yields the folder."""
    folder = f"/workspace/data/{name}"
    in_node(rack, f"mkdir -p {folder}; mount -t tmpfs -o size=2m,mode=777 tmpfs {folder}")
    try:
        yield folder
    finally:
        in_node(rack, f"umount {folder}")


def test_every_host_that_lacks_it_gets_it_and_the_others_nothing(rack: Rack, data: Path) -> None:
    assert bring(rack) == {name: ["3", "0", "6.0", ""] for name in ("host-a", "host-b")}
    assert digests(rack, "host-a") == digests(rack, "host-b") == expected(data)
    # Folders and files are the operator's there, and nothing else is left.
    for host in rack:
        assert listed(rack, host.name) == [*FILES]
        assert host.sh(f"find {WORKSPACE}/data -printf '%u %m\n' | sort -u").split("\n")[:-1] == [
            f"{USER} 644", f"{USER} 755",
        ]  # fmt: skip
    rack["host-b"].sh(f"rm {WORKSPACE}/data/sync/x.idx")
    assert bring(rack) == {"host-a": ["0", "3", "0.0", ""], "host-b": ["1", "2", "0.0", ""]}
    assert digests(rack, "host-b") == expected(data)


@pytest.mark.parametrize("df", ["the disk's", pytest.param("a wrong one", marks=pytest.mark.full)])
def test_a_host_without_room_is_named_and_the_other_gets_it(rack: Rack, data: Path, df: str) -> None:
    """A quota, or another writer, takes away what df promises."""
    (rack.project / "data" / "full").mkdir(exist_ok=True)
    (rack.project / "data" / "full" / "z.bin").write_bytes(os.urandom(SIZE))
    wrong = df == "a wrong one"
    if wrong:
        assert rack.fab("up", hosts=HOSTS).returncode == 0
        in_node(rack, "printf '#!/bin/sh\necho 99999999999\n' >/usr/local/bin/df; chmod 755 /usr/local/bin/df")
    with small_disk(rack, "full") as folder:
        done = rack.fab("data", "--path", "data/full", hosts=HOSTS)
        in_node(rack, f"! ls {folder}/z.bin")
    assert done.returncode == 3
    if wrong:
        in_node(rack, "rm /usr/local/bin/df")
        assert re.fullmatch(
            r"host-b: `rsync data/full` failed with exit code 11; got .*z\.bin.*No space left on device.*; "
            r"free some space there \(docker system df shows Docker's share; df -i the inodes\)",
            done.stderr.splitlines()[0],
        ), done.stderr
    else:
        assert done.stderr.splitlines() == [
            f"host-b: has too little disk space for the data; got 6.0 MB to send, 2.1 MB free in host-b:{folder}; "
            "free some space there, or choose another folder (workdir in the settings)",
            "host-a: no problem here; fix the others",
        ]
    assert rows(done)["host-b"] == ["", "", "", "failed"]
    assert digests(rack, "host-a", f"{WORKSPACE}/data/full") == expected(rack.project / "data" / "full", "z.bin")


def test_a_disk_that_both_hosts_see_gets_one_copy(rack: Rack, data: Path) -> None:
    """By a link to it, as many a home has one."""
    rack["host-a"].sh(f"mkdir -p {SHARED}/corpus; chown {UID}:{UID} {SHARED}/corpus")
    for host in rack:
        host.sh(f"ln -s {SHARED}/corpus {WORKSPACE}/data/linked", user=USER)
    (rack.project / "data" / "linked").mkdir()
    (rack.project / "data" / "linked" / "w").write_text("w")
    assert bring(rack, "--path", "data/linked") == {
        "host-a": ["1", "0", "0.0", ""], "host-b": ["", "", "", "shared with host-a"],
    }  # fmt: skip
    assert listed(rack, "host-b", f"{SHARED}/corpus") == ["w"]


HELD = """#!/bin/sh
{ stdbuf -o0 head -c 20000000; until [ -e /tmp/go ]; do sleep 0.1; done; cat; } | /usr/bin/flock "$@"
"""
"""Stands before the rsync that receives: it passes the beginning on, and the rest later."""


@contextmanager
def held(rack: Rack) -> Iterator[None]:
    """While no node receives more than the beginning of what is sent to it."""
    for host in rack.hosts:
        in_node(rack, f"printf %s {shlex.quote(HELD)} >/usr/local/bin/flock; chmod 755 /usr/local/bin/flock", host)
    try:
        yield
    finally:
        for host in rack.hosts:
            in_node(rack, "touch /tmp/go; rm /usr/local/bin/flock", host)


@pytest.mark.full  # test_data_over_ssh.py
def test_ctrl_c_in_the_middle_and_the_rest_afterwards(rack: Rack, data: Path) -> None:
    folder = f"{WORKSPACE}/data/large"
    local = rack.project / "data" / "large"
    local.mkdir()
    with (local / "big.bin").open("wb") as file:
        file.write(os.urandom(300_000_000))
    (local / "big.idx").write_text("index")

    def arrived() -> list[int]:
        sizes = [host.execute(f"stat -c %s {folder}/.big.bin.* {folder}/.tridock-part/big.bin").stdout for host in rack]
        return [int(size or 0) for size in sizes]

    assert rack.fab("up", hosts=HOSTS).returncode == 0
    with held(rack), rack.attached("data", "--path", "data/large", hosts=HOSTS) as terminal:
        wait_until(lambda: min(arrived()) > 4_000_000, "some of it is there")
        assert terminal.interrupt() == 130
        assert terminal.text().splitlines()[-1] == "interrupted"
    idle = lambda: all(host.execute(f"pgrep -u {USER} rsync").returncode for host in rack)  # noqa: E731
    wait_until(idle, "nobody writes there any more")
    assert [listed(rack, host.name, folder) for host in rack] == [[".tridock-part"]] * 2
    before = arrived()
    assert max(before) < 300_000_000
    found = bring(rack, "--path", "data/large/big")
    assert [float(cells[2]) for cells in found.values()] == pytest.approx(
        [(300_000_000 - size) / 1e6 for size in before], abs=0.2
    )
    for host in rack:
        assert listed(rack, host.name, folder) == ["big.bin", "big.idx"]
        assert host.sh(f"sha256sum <{folder}/big.bin") == local_hash(local / "big.bin")
    assert [cells[:2] for cells in bring(rack, "--path", "data/large/big").values()] == [["0", "2"]] * 2


def local_hash(path: Path) -> str:
    return execute("sh", "-c", 'sha256sum <"$1"', "sh", str(path)).stdout


def test_a_host_that_cannot_be_reached_is_named_and_the_other_gets_it(rack: Rack, data: Path) -> None:
    rack["host-a"].sh(f"rm -rf {WORKSPACE}/data/sync")
    key = rack["host-a"].sh("cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub").strip()
    config = rack.write_ssh_config("one_known", known={"host-a": key})
    rack.write_cluster(NAME, ssh_port=PORT, container=CONTAINER, ssh={"config_file": config})
    done = rack.fab("data", "--path", "data/sync/x", hosts=HOSTS)
    rack.write_cluster(NAME, ssh_port=PORT, container=CONTAINER)
    assert done.returncode == 3
    assert rows(done)["host-b"] == ["", "", "", "failed"]
    assert digests(rack, "host-a") == expected(data)
    first, second = done.stderr.splitlines()
    assert first.startswith("host-b: its host key is not known here; ")
    assert second == "host-a: no problem here; fix the others"
