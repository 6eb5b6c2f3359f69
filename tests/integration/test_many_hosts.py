"""`tridock up` on 32 hosts: a real sshd for each, and a stand-in for Docker that is as slow as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

from tests.integration.sshd import ROOT, Sshd
from tests.patience import WORK_S

CAP = 8
STEPS = (("started", 1), ("ended", -1))
IMAGE = "sha256:0123456789abcdef"
# `docker inspect` answers with the labels of `docker run`. The times of a start are recorded.
DOCKER = r"""#!/bin/bash
case $1 in
inspect)
  echo '{"Id":"IMAGE","RootFS":{}}'
  if [ ! -e "$STATE/labels" ]; then exit 1; fi
  printf '{"Id":"1","Image":"IMAGE","Config":{"Labels":%s},' "$(cat "$STATE/labels")"
  echo '"State":{"Running":true,"ExitCode":0,"Health":{"Status":"healthy"}}}' ;;
run)
  date +%s.%N >"$STATE/started"
  for word; do case $word in tridock.*=*) labels="$labels,\"${word%%=*}\":\"${word#*=}\"" ;; esac; done
  sleep 0.5
  printf '{%s}' "${labels#,}" >"$STATE/labels"
  date +%s.%N >"$STATE/ended" ;;
exec | update) ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac
""".replace("IMAGE", IMAGE)


@pytest.fixture
def lab(make_sshd: Callable[..., Sshd], tmp_path: Path) -> dict[str, Sshd]:
    """Hosts h01 to h32, and the ssh configuration that finds them."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    sshds = {}
    for number in range(1, 33):
        name, state = f"h{number:02d}", tmp_path / f"h{number:02d}"
        state.mkdir()
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "STATE": str(state), "HOME": str(state)}
        sshds[name] = make_sshd(name=f"sshd-{name}", environment=environment)
    (tmp_path / "ssh_config").write_text(
        "".join(
            f"Host {name}\n HostName 127.0.0.1\n Port {sshd.port}\n IdentityFile {sshd.client_key}\n"
            f" UserKnownHostsFile {sshd.known_hosts}\n GlobalKnownHostsFile none\n"
            for name, sshd in sshds.items()
        )
    )
    return sshds


def up(folder: Path, names: list[str]) -> float:
    """`tridock up` on these hosts; its seconds."""
    hostfile = folder / f"lab-{len(names)}"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
    settings = {
        "name": "lab", "image": "tridock-test-no-such:image",
        "ssh": {"config_file": f"{folder}/ssh_config", "max_connections": CAP}, "container": {"gpus": "none"},
    }  # fmt: skip
    hostfile.with_name(f"{hostfile.name}.yaml").write_text(json.dumps(settings))
    program = str(Path(sys.executable).with_name("fab"))
    argv = [program, "--search-root", str(ROOT), "up", "--hosts", str(hostfile)]
    began = time.monotonic()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=WORK_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{len(names)} nodes up, image {IMAGE[:19]}: {', '.join(names)}\n"
    return time.monotonic() - began


@pytest.mark.full  # test_remote_fanout.py: the cap
def test_32_hosts_are_brought_up_under_the_cap(lab: dict[str, Sshd], tmp_path: Path) -> None:
    names = list(lab)
    few = up(tmp_path, names[:2])
    for name in names[:2]:
        (tmp_path / name / "labels").unlink()
    many = up(tmp_path, names)
    before = [sshd.log.count("Starting session") for sshd in lab.values()]
    again = up(tmp_path, names)
    # What is right costs a host one command: its facts, with the node's answer. The head also has the lock's file.
    counts = [sshd.log.count("Starting session") - earlier for sshd, earlier in zip(lab.values(), before, strict=True)]
    assert counts == [2] + [1] * 31
    # One login, whatever the number of steps and commands.
    assert [sshd.log.count("Accepted publickey") for sshd in lab.values()] == [1] * 32
    moments = [(float((tmp_path / name / which).read_text()), step) for name in names for which, step in STEPS]
    assert max(accumulate(step for _, step in sorted(moments))) <= CAP
    print(f"\nfab up: 2 hosts {few:.2f} s, 32 hosts {many:.2f} s under a cap of {CAP}, again {again:.2f} s")
