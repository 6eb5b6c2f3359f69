"""`tridock data sync` through real sshds on loopback, with a stand-in for Docker: start-up files, Ctrl-C, speed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.sshd import DOCKER, Sshd, running, wait_until
from tests.patience import STEP_S

COMMAND = (sys.executable, "-m", "tridock.cli", "data", "sync", "--hosts", "lab", "--path", "data/x")


@pytest.fixture
def hosts(make_sshd: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sshd]:
    """Hosts h0 to h3, and a project with a data set."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "docker").write_text(DOCKER)
    (tmp_path / "programs" / "docker").chmod(0o755)
    path = {"PATH": f"{tmp_path}/programs:{os.environ['PATH']}"}
    made = [make_sshd(name=f"h{number}", environment=path) for number in range(4)]
    config = [
        f"Host h{number}\n HostName 127.0.0.1\n Port {sshd.port}\n IdentityFile {sshd.client_key}\n"
        f" UserKnownHostsFile {sshd.known_hosts}\n GlobalKnownHostsFile none\n"
        for number, sshd in enumerate(made)
    ]
    (tmp_path / "ssh_config").write_text("".join(config))
    for sshd in made:
        workspace(sshd).mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "lab").write_text("".join(f"h{number} slots=1\n" for number in range(4)))
    (tmp_path / "lab.yaml").write_text(json.dumps({"name": "lab", "ssh": {"config_file": f"{tmp_path}/ssh_config"}}))
    monkeypatch.chdir(tmp_path)
    return made


def workspace(sshd: Sshd) -> Path:
    return sshd.home / "tridock" / "lab" / "workspace"


def write(size: int) -> dict[str, bytes]:
    files = {"x.bin": os.urandom(size), "x.idx": b"index"}
    for name, content in files.items():
        Path("data", name).write_bytes(content)
    return files


def test_start_up_files_that_print_do_no_harm(hosts: list[Sshd]) -> None:
    for sshd in hosts:
        (sshd.home / ".bashrc").write_text("echo welcome; printf 'no line'; echo oops >&2\n")
    files = write(300_000)
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for sshd in hosts:
        assert {name: (workspace(sshd) / "data" / name).read_bytes() for name in files} == files


def test_ctrl_c_ends_it_everywhere_and_the_rest_follows(hosts: list[Sshd], tmp_path: Path) -> None:
    """What a host gets in the first call ends with its first 5 MB, however quick the machine is."""
    files, docker = write(200_000_000), tmp_path / "programs" / "docker"
    docker.write_text(DOCKER.replace('exec "$@"', f'{HELD}exec "$@"'))
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(lambda: all(parts(sshd) > 1_000_000 for sshd in hosts))
        process.send_signal(signal.SIGINT)
        assert process.wait(STEP_S) == 130
    wait_until(lambda: not any(map(locked, hosts)) and not running(f"{tmp_path}/data/"))
    # The rsync that receives keeps its part after the one that it belongs to has ended.
    wait_until(lambda: [names(sshd) for sshd in hosts] == [[PARTS, LOCK]] * 4)
    docker.write_text(DOCKER)
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sent = [float(line.split("│")[4]) for line in done.stdout.splitlines() if line.startswith("│")]
    assert all(0 < megabytes < 199.5 for megabytes in sent)
    for sshd in hosts:
        assert (workspace(sshd) / "data" / "x.bin").read_bytes() == files["x.bin"]


PARTS, LOCK = ".tridock-part", ".tridock-sync.lock"
HELD = """
  case "$*" in *flock*)
    { dd bs=64k iflag=count_bytes count=5000000; cat >/dev/null; } 2>/dev/null | "$@"; exit ;;
  esac
  """
"""A part of the stand-in for Docker: of what is sent, only the first 5 MB reach rsync."""


def names(sshd: Sshd) -> list[str]:
    return sorted(path.name for path in (workspace(sshd) / "data").iterdir())


def parts(sshd: Sshd) -> int:
    return sum(path.stat().st_size for path in (workspace(sshd) / "data").glob(".x.bin.*"))


def locked(sshd: Sshd) -> bool:
    """Whether a process of the host still receives."""
    return subprocess.run(("flock", "-n", workspace(sshd) / "data" / LOCK, "true"), check=False).returncode != 0


@pytest.mark.full
def test_speed_compared_with_rsync_by_hand(hosts: list[Sshd], tmp_path: Path) -> None:
    """1 GB to four hosts, in turns."""
    write(1_000_000_000)
    by_hand = "for n in 0 1 2 3; do rsync -a -e 'ssh -F ssh_config' data/ h$n:$PWD/h$n/home/by-hand/ & done; wait"
    seconds: dict[str, list[float]] = {"tridock": [], "rsync": []}
    for _ in range(3):
        for name, argv in {"rsync": ("bash", "-c", by_hand), "tridock": COMMAND}.items():
            began = time.monotonic()
            subprocess.run(argv, check=True, capture_output=True)
            seconds[name].append(time.monotonic() - began)
            for sshd in hosts:
                folder = workspace(sshd) / "data" if name == "tridock" else sshd.home / "by-hand"
                assert (folder / "x.bin").stat().st_size == 1_000_000_000
                shutil.rmtree(folder)
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    print(f"\n{seconds}\nratio of the medians: {medians['tridock'] / medians['rsync']:.2f}")
    assert medians["tridock"] < 1.2 * medians["rsync"]
