"""`fab data` on two Docker hosts over ssh, before any node is up: what goes where, and what a rack does meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.rack import PROGRAMS, SHARED, UID, USER, Rack
from tests.integration.support import execute, wait_until

pytestmark = pytest.mark.timeout(600)

NAME = "sync"
HOSTS = f"hostfiles/{NAME}"
WORKSPACE = f"/home/{USER}/tridock/{NAME}/workspace"
SIZE = 6_000_000
FILES = {"x.bin": SIZE, "x.idx": 1000, "x.json": 2}


@pytest.fixture(scope="module", autouse=True)
def data(rack: Rack) -> Path:
    """A data set of the operator's, and a cluster that has no node."""
    rack.write_cluster(NAME)
    folder = rack.project / "data" / "sync"
    folder.mkdir(parents=True)
    for name, size in FILES.items():
        (folder / name).write_bytes(b"{}" if name.endswith(".json") else os.urandom(size))
    return folder


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Of each node: files sent, files there, megabytes, and what the last cell says."""
    lines = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cells[number].strip() for number in (1, 2, 3, 6)] for cells in lines}


def bring(rack: Rack, *arguments: str, hosts: str = HOSTS) -> dict[str, list[str]]:
    done = rack.fab("data", *(arguments or ("--path", "data/sync/x")), hosts=hosts)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(done)


def listed(rack: Rack, host: str, folder: str = f"{WORKSPACE}/data/sync") -> list[str]:
    return rack[host].sh('ls -A "$1"', folder).split()


def digests(rack: Rack, host: str, folder: str = f"{WORKSPACE}/data/sync") -> str:
    return rack[host].sh('cd "$1" && sha256sum *', folder)


def expected(data: Path, *names: str) -> str:
    return "".join(execute("sha256sum", name, cwd=data).stdout for name in names or FILES)


def test_every_host_that_lacks_it_gets_it_and_the_others_nothing(rack: Rack, data: Path) -> None:
    assert bring(rack) == {name: ["3", "0", "6.0", ""] for name in ("host-a", "host-b")}
    assert digests(rack, "host-a") == digests(rack, "host-b") == expected(data)
    # Folders and files are the operator's there, nothing else is left, and no node was needed.
    for host in rack:
        assert listed(rack, host.name) == [*FILES]
        assert host.sh("find ~trainer/tridock/sync -printf '%u %m\n' | sort -u").split("\n")[:-1] == [
            f"{USER} 644", f"{USER} 755",
        ]  # fmt: skip
        assert host.sh("ls -A /tmp | grep tmp. || true") == ""
    rack["host-b"].sh(f"rm {WORKSPACE}/data/sync/x.idx")
    assert bring(rack) == {"host-a": ["0", "3", "0.0", ""], "host-b": ["1", "2", "0.0", ""]}
    assert digests(rack, "host-b") == expected(data)


def test_a_byte_that_went_wrong_is_found_and_mended(rack: Rack, data: Path) -> None:
    script = 'cp -p "$1" "$1.was"; printf X | dd of="$1" bs=1 seek=123456 conv=notrunc 2>/dev/null'
    rack["host-b"].sh(f'{script}; touch -r "$1.was" "$1"; rm "$1.was"', f"{WORKSPACE}/data/sync/x.bin")
    assert digests(rack, "host-b") != expected(data)
    found = bring(rack)
    assert found["host-a"][:2] == ["0", "3"]
    assert found["host-b"][:3] == ["1", "2", "6.0"]
    assert digests(rack, "host-b") == expected(data)


def test_a_dry_run_and_the_other_command_line(rack: Rack, data: Path) -> None:
    (data / "new").mkdir()
    (data / "new" / "y.txt").write_text("y")
    sync = [str(PROGRAMS / "python"), "-m", "tridock.cli", "data", "sync", "--hosts", HOSTS, "--path", "data/sync/new"]
    done = execute(*sync, "--dry-run", cwd=rack.project, env=rack.environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done) == {name: ["1", "0", "0.0", ""] for name in ("host-a", "host-b")}
    assert "new" not in listed(rack, "host-a")
    assert execute(*sync, cwd=rack.project, env=rack.environment()).returncode == 0
    assert rack["host-b"].sh(f"cat {WORKSPACE}/data/sync/new/y.txt") == "y"


def test_a_host_without_room_is_named_and_the_other_gets_it(rack: Rack, data: Path) -> None:
    folder = f"{WORKSPACE}/data/full"
    (rack.project / "data" / "full").mkdir()
    (rack.project / "data" / "full" / "z.bin").write_bytes(os.urandom(SIZE))
    with rack["host-b"].small_disk(folder, "2m"):
        done = rack.fab("data", "--path", "data/full", hosts=HOSTS)
        assert listed(rack, "host-b", folder) == []
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"host-b: has too little disk space for the data; got 6.0 MB to send, 2.1 MB free in {folder}; "
        "free some space there, or choose another folder (workdir in the settings)",
        "host-a: no problem here; fix the others",
    ]
    assert rows(done)["host-b"] == ["", "", "", "failed"]
    assert digests(rack, "host-a", folder) == expected(rack.project / "data" / "full", "z.bin")


def test_a_disk_that_fills_up_meanwhile(rack: Rack, data: Path) -> None:
    """df promises what a quota, or another writer, takes away: here by a df of its own on the host's PATH."""
    folder = f"{WORKSPACE}/data/full"
    rack["host-b"].sh("printf '#!/bin/sh\necho a 1 1 99999999 1%% /\n' >/usr/local/bin/df; chmod 755 /usr/local/bin/df")
    try:
        with rack["host-b"].small_disk(folder, "2m"):
            done = rack.fab("data", "--path", "data/full", hosts=HOSTS)
            assert all(name.endswith(".part") for name in listed(rack, "host-b", folder))
    finally:
        rack["host-b"].sh("rm /usr/local/bin/df")
    assert done.returncode == 3
    assert re.fullmatch(
        rf"host-b: `write {folder}/z\.bin` failed with exit code \d+; got .*No space left on device.*; "
        r"free some space there \(docker system df shows Docker's share\)",
        done.stderr.splitlines()[0],
    ), done.stderr


def test_a_file_system_that_both_hosts_see_gets_one_copy(rack: Rack, data: Path) -> None:
    workdir = f"{SHARED}/tridock"
    rack["host-a"].sh(f"mkdir -p {workdir}; chown {UID}:{UID} {workdir}")
    hosts = rack.write_cluster("shared", workdir=workdir)
    assert bring(rack, "--path", "data/sync/x", hosts=hosts) == {
        "host-a": ["3", "0", "6.0", ""], "host-b": ["", "", "", "shared with host-a"],
    }  # fmt: skip
    assert listed(rack, "host-b", f"{workdir}/workspace/data/sync") == [*FILES]
    # Another workspace, but the same data: a link to the common disk, as many a home has one.
    for host in rack:
        host.sh(f"rm -rf {WORKSPACE}/data/linked; ln -s {SHARED}/tridock {WORKSPACE}/data/linked", user=USER)
    (rack.project / "data" / "linked").mkdir()
    (rack.project / "data" / "linked" / "w").write_text("w")
    assert bring(rack, "--path", "data/linked")["host-b"][3] == "shared with host-a"
    assert listed(rack, "host-b", f"{SHARED}/tridock") == ["w", "workspace", "workspace.hashes"]


def test_ctrl_c_in_the_middle_and_the_rest_afterwards(rack: Rack, data: Path) -> None:
    folder = f"{WORKSPACE}/data/large"
    local = rack.project / "data" / "large"
    local.mkdir()
    with (local / "big.bin").open("wb") as file:
        file.truncate(150_000_000)
    (local / "big.idx").write_text("index")

    def arrived() -> list[int]:
        sizes = [host.execute(f"stat -c %s {folder}/.big.bin.*.part").stdout for host in rack]
        return [int(size or 0) for size in sizes]

    with rack.attached("data", "--path", "data/large", hosts=HOSTS) as terminal:
        wait_until(lambda: min(arrived()) > 4_000_000, "some of it is there", 60)
        assert terminal.interrupt() == 130
        assert terminal.text().splitlines()[-1] == "interrupted"
    assert [len(listed(rack, host.name, folder)) for host in rack] == [1, 1]
    idle = lambda: all(host.execute(f"pgrep -u {USER} cat").returncode for host in rack)  # noqa: E731
    wait_until(idle, "nobody writes there any more")
    before = arrived()
    assert max(before) < 150_000_000
    found = bring(rack, "--path", "data/large/big")
    assert [float(cells[2]) for cells in found.values()] == pytest.approx(
        [(150_000_000 - size) / 1e6 for size in before], abs=0.1
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
    hosts = rack.write_cluster("one-known", workdir=f"/home/{USER}/tridock/{NAME}", ssh={"config_file": config})
    done = rack.fab("data", "--path", "data/sync/x", hosts=hosts)
    assert done.returncode == 3
    assert rows(done)["host-b"] == ["", "", "", "failed"]
    assert digests(rack, "host-a") == expected(data)
    first, second = done.stderr.splitlines()
    assert first.startswith("host-b: its host key is not known here; ")
    assert second == "host-a: no problem here; fix the others"


def test_the_twin_has_it_all(rack: Rack, data: Path) -> None:
    found = bring(rack, "--path", "data/sync/x", hosts="hostfiles/twin")
    assert found == {name: ["", "", "", "the project's folder"] for name in ("node-1", "node-2")}
