"""`fab` over a real sshd on loopback to nodes without Docker: a stand-in for it runs their commands on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.sshd import ROOT, USER, Sshd, free_port

RUN = "tiny-20260102-030405-abcd"

# One node that runs. What is asked of it inside sees the folder $WORKSPACE as /workspace.
DOCKER = rf"""#!/bin/bash
case $1 in
version) echo 28.1 ;;
image) echo 'image sha256:0123456789abcdef' ;;
container) echo 'container {{"Id": "1", "Image": "sha256:0123456789abcdef", "Config": {{}},
"State": {{"Running": true, "ExitCode": 0}}}}' | tr -d '\n'; echo ;;
exec)
  while [ "$1" != tridock-lab ]; do shift; done
  shift
  export PYTHONPATH={shlex.quote(str(ROOT))}
  if [ "$1" = python ]; then exec {shlex.quote(sys.executable)} "${{@:2}}" --workspace "$WORKSPACE"; fi
  exec "${{@//\/workspace/$WORKSPACE}}" ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac
"""


@dataclass
class Lab:
    """Two hosts behind an sshd each; the operator's project is a folder of its own."""

    folder: Path
    workspaces: dict[str, Path]
    sshds: dict[str, Sshd]

    def configure(self, **ports: int) -> None:
        """Writes hostfile and ssh configuration; ``ports`` replaces where a host is looked for."""
        (self.folder / "lab").write_text("".join(f"{name} slots=2\n" for name in self.sshds))
        (self.folder / "lab.yaml").write_text(
            f"ssh: {{config_file: {self.folder}/ssh_config, retries: 0, connect_timeout: 5.0}}\n"
        )
        blocks = []
        for name, sshd in self.sshds.items():
            port = ports.get(name.replace("-", "_"), sshd.port)
            blocks.append(
                f"Host {name}\n HostName 127.0.0.1\n Port {port}\n IdentityFile {sshd.client_key}\n"
                f" UserKnownHostsFile {sshd.known_hosts}\n GlobalKnownHostsFile none\n"
            )
        (self.folder / "ssh_config").write_text("".join(blocks))

    def argv(self, task: str, *words: str) -> list[str]:
        program = str(Path(sys.executable).with_name("fab"))
        return [program, "--search-root", str(ROOT), task, "--hosts", str(self.folder / "lab"), *words]

    def fab(self, task: str, *words: str) -> subprocess.CompletedProcess[str]:
        argv, home = self.argv(task, *words), self.folder
        return subprocess.run(argv, cwd=home, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def lab(make_sshd: Callable[..., Sshd], tmp_path: Path) -> Iterator[Lab]:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    made = Lab(tmp_path / "operator", {}, {})
    made.folder.mkdir()
    for name in ("gpu-1", "gpu-2"):
        workspace = made.workspaces[name] = tmp_path / f"of-{name}"
        (workspace / "runs").mkdir(parents=True)
        made.sshds[name] = make_sshd(f"SetEnv PATH={programs}:{os.environ['PATH']} WORKSPACE={workspace}", name=name)
    made.configure()
    return made


def cells(table: str) -> list[list[str]]:
    """The rows of tables as Rich draws them."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]


def make_run(workspace: Path, **files: bytes) -> Path:
    folder = workspace / "runs" / RUN
    folder.mkdir()
    (folder / "exit_code").write_text("0\n")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


# ---- status ----------------------------------------------------------------------------------------------------------


def test_status_shows_nodes_and_runs(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-2"])
    done = lab.fab("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert cells(done.stdout) == [
        ["gpu-1", "2", "running", "0123456789ab"],
        ["gpu-2", "2", "running", "0123456789ab"],
        [RUN, "done", "", "", "20260102-030405"],
    ]


def test_status_with_a_host_away_shows_the_others_and_their_runs(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-2"])
    port = free_port()
    lab.configure(gpu_1=port)
    done = lab.fab("status")
    assert cells(done.stdout) == [
        ["gpu-1", "2", "unreachable", ""],
        ["gpu-2", "2", "running", "0123456789ab"],
        [RUN, "done", "", "", "20260102-030405"],
    ]
    assert done.stderr == (
        f"gpu-1: nothing listens at 127.0.0.1 port {port}; got connection refused; "
        "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)\n"
        "gpu-2: no problem here; mend the others\n"
    )
    assert done.returncode == 3


def test_status_with_every_host_away(lab: Lab) -> None:
    lab.sshds["gpu-2"].known_hosts.write_text("")
    ports = {name: sshd.port for name, sshd in lab.sshds.items()}
    lab.sshds["gpu-1"].stop()
    done = lab.fab("status")
    assert cells(done.stdout) == [["gpu-1", "2", "unreachable", ""], ["gpu-2", "2", "unreachable", ""]]
    first, second = done.stderr.splitlines()
    assert first == (
        f"gpu-1: nothing listens at 127.0.0.1 port {ports['gpu-1']}; got connection refused; "
        "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)"
    )
    assert second.startswith(f"gpu-2: its host key is not known here; got {USER}@127.0.0.1 port {ports['gpu-2']}: ")
    assert done.returncode == 3


def test_status_with_a_wrong_request_shows_no_table(lab: Lab) -> None:
    (lab.folder / "ssh_config").write_text("Prot 22\n")
    done = lab.fab("status")
    got = f"{lab.folder}/ssh_config: line 1: Bad configuration option: prot"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"{name}: ssh cannot read its configuration; got {got}; mend what it names" for name in ("gpu-1", "gpu-2")
    ]
