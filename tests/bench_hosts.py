"""`make bench-hosts`: how long the commands take on many hosts, beside the time that ssh alone takes.

Each host is a real sshd of this machine with a stand-in for Docker that answers at once: what is measured is the
operator's side. The floor is what a user would type, a plain `ssh HOST true` for each host, as many at a time; it is
measured before each command, because the machine's speed changes. All values are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from tests.integration.sshd import ROOT, Sshd, public
from tridock.contracts import run_folder
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import (
    PROTOCOL,
    Accelerators,
    Code,
    Infiniband,
    NodeReport,
    PlacedCode,
    PortAnswer,
    PreflightAnswer,
    QuickReport,
    RunInfo,
    Space,
    Stopped,
)
from tridock.contracts.run_state import RunState
from tridock.contracts.supervision import contract

IMAGE = "sha256:0123456789abcdef"
RUN_ID = "demo-20260101-000000-1234"
NOW = RunInfo(RUN_ID, RunState.RUNNING, None, "20260101-000000", None, "demo", (), 10, 1.0, 1.0)
# `docker inspect` prints what `docker run` got; `docker exec` prints one run that is running.
DOCKER = r"""#!/bin/sh
case $1 in
inspect)
  echo '{"Id":"IMAGE","RootFS":{}}'
  if [ ! -e "$STATE/container" ]; then exit 1; fi
  read -r labels <"$STATE/container"
  printf '{"Id":"1","Image":"IMAGE","Config":{"Labels":%s},"State":{"Running":true,"ExitCode":0,' "$labels"
  echo '"Health":{"Status":"healthy"}}}' ;;
run)
  labels=
  for word; do case $word in tridock.*=*) labels="$labels,\"${word%%=*}\":\"${word#*=}\"" ;; esac; done
  echo "{${labels#,}}" >"$STATE/container" ;;
rm) rm -f "$STATE/container" ;;
exec)
  for word; do if [ -e "$ANSWERS/$word" ]; then answer=$word; fi; done
  if [ -n "$answer" ]; then exec cat "$ANSWERS/$answer"; fi ;;
esac
"""
QUICK = QuickReport(
    protocol=PROTOCOL, shm=Space(1 << 34, 1 << 34), disk=Space(1 << 40, 1 << 40), unwritable=None, built_for="cpu",
    cuda_error=None,
)  # fmt: skip
REPORT = NodeReport(
    **{field.name: getattr(QUICK, field.name) for field in fields(QUICK)}, memlock=None, files=None, cores=8,
    accelerators=Accelerators(), infiniband=Infiniband(), code=Code("1", None), runs=(),
    rendezvous=PortAnswer(29500), nccl_ib_disable=None,
)  # fmt: skip
# What each verb of tridock.node answers; --quick is the doctor's part before a launch.
ANSWERS = {
    "runs": encode([NOW]),
    "stop": encode(Stopped(8, 0)),
    "queue": "[]",
    "node-report": encode(REPORT),
    "--quick": encode(QUICK),
    "mesh-probe": "{}",
    "tridock.train.allreduce": '{"ranks": 64, "backend": "gloo", "bytes": 1000000, "bus_bytes_per_second": 1e9}',
    "preflight": encode(PreflightAnswer({}, rendezvous=PortAnswer(29500), contract=contract())),
    "place-code": encode(PlacedCode(())),
    "follow": f"iteration 1\n{run_folder.END.decode()}",
}
FLOOR = 'xargs --max-args 1 --max-procs 16 -I HOST ssh -F "$1/ssh_config" HOST true <"$1/names"'
# Tridock's own: one `true` on every host, over connections that the command before left open.
OPEN = (
    "import sys; from pathlib import Path; from tridock.command import Command; "
    "from tridock.cluster.settings import load_cluster; from tridock.ops.hosts.hosts import Hosts; "
    "Hosts(load_cluster(Path(sys.argv[1]))).each(lambda node, host: host.run(Command.of('true')).checked(node))"
)


def start(folder: Path, count: int) -> Path:
    """So many hosts, and the hostfile that names them; all their keys are in one known_hosts, as at home."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER.replace("IMAGE", IMAGE))
    (programs / "docker").chmod(0o755)
    (folder / "answers").mkdir()
    for verb, answer in ANSWERS.items():
        (folder / "answers" / verb).write_text(answer)
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text("print('iteration 1')\n")
    names, config, known = [f"h{number:03}" for number in range(count)], [], []
    for name in names:
        state = folder / name
        state.mkdir()
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "STATE": str(state), "HOME": str(state)}
        environment["ANSWERS"] = str(folder / "answers")
        sshd = Sshd(folder / f"sshd-{name}", "MaxStartups 100", environment).start()
        STARTED.append(sshd)
        config.append(f"Host {name}\n HostName 127.0.0.1\n Port {sshd.port}\n IdentityFile {sshd.client_key}\n")
        known.append(f"[127.0.0.1]:{sshd.port} {public(sshd.host_key)}\n")
    (folder / "known_hosts").write_text("".join(known))
    common = f"Host *\n UserKnownHostsFile {folder}/known_hosts\n GlobalKnownHostsFile none\n IdentityAgent none\n"
    (folder / "ssh_config").write_text("".join((*config, common)))
    (folder / "names").write_text("".join(f"{name}\n" for name in names))
    (folder / "lab").write_text("".join(f"{name} slots=1\n" for name in names))
    ssh = {"config_file": f"{folder}/ssh_config", "max_connections": 16}
    settings = {"image": "tridock-bench-no-such:image", "ssh": ssh, "container": {"gpus": "none"}}
    (folder / "lab.yaml").write_text(json.dumps(settings))
    return folder / "lab"


RUN = ("--workdir", "code", "--detach", "--share")
STARTED: list[Sshd] = []


def commands(hostfile: str) -> dict[str, tuple[str, ...]]:
    """The command lines, in an order in which each works."""
    hosts = ("--hosts", hostfile)
    return {
        "up, first": ("up", *hosts),
        "up, again": ("up", *hosts),
        "status": ("status", *hosts),
        "check": ("check", *hosts),
        "run": ("run", *RUN, *hosts, "--", "python", "train.py"),
        "logs": ("logs", "--run", RUN_ID, *hosts),
        "stop": ("stop", *hosts),
        "keys": ("keys", *hosts),
        "down --force": ("down", "--force", *hosts),
    }


def timed(*argv: str, folder: Path) -> tuple[float, float, float]:
    """Seconds on the clock, processor seconds of the command and of what it waited for, and the most memory in MB of
    one of its processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}:\n{output.read()}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def main() -> None:
    """Prints a line a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print("hosts  command          seconds  of the floor  processor  memory (MB)")
    for count in arguments.hosts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            try:
                hostfile = str(start(folder, count))
                taken: dict[str, list[tuple[float, ...]]] = {}
                for number in range(arguments.repeats):
                    shutil.rmtree(folder / ".tridock", ignore_errors=True)  # with the keys
                    os.environ["XDG_RUNTIME_DIR"] = str(folder / f"{number}")  # no connection is open yet
                    (folder / f"{number}").mkdir(mode=0o700)
                    for what, argv in commands(hostfile).items():
                        floor = timed("bash", "-c", FLOOR, "bash", str(folder), folder=folder)
                        taken.setdefault("ssh", []).append((floor[0], 1.0, *floor[1:]))
                        python = {what: ("-m", "tridock.cli", *argv)}
                        if what == "up, again":
                            python = {"true": ("-c", OPEN, hostfile), **python}
                        for name, program in python.items():
                            seconds, *rest = timed(sys.executable, *program, folder=folder)
                            taken.setdefault(name, []).append((seconds, seconds / floor[0], *rest))
                for what, rows in taken.items():
                    seconds, ratio, processor, memory = (
                        statistics.median(column) for column in zip(*rows, strict=True)
                    )
                    print(
                        f"{count:5}  {what:15} {seconds:8.2f} {ratio:13.2f} {processor:10.1f} {memory:12.0f}",
                        flush=True,
                    )
            finally:
                while STARTED:
                    STARTED.pop().stop()


if __name__ == "__main__":
    main()
