"""`make bench-image`: how long an image, and an edit of one line, take to reach many hosts, and how many bytes.

The hosts are containers of this machine, each with a Docker engine and an sshd of its own. The first host gets the
whole image; the others begin as copies of its disk. The bytes are those that this machine sent to the hosts, and those
that all hosts received. They share this machine's cores, as real hosts do not: the last
columns are the processor seconds of the operator's command, of the busiest host and of all hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "tridock-bench-image"
IMAGE = f"{NAME}:cpu"
USER = "trainer"
# What lets a dockerd run inside a container without --privileged.
NESTED = [
    *("--cap-add", "ALL", "--cap-drop", "SYS_RESOURCE", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw"),
    *(word for what in ("seccomp", "apparmor", "systempaths") for word in ("--security-opt", f"{what}=unconfined")),
]
# Nanoseconds or microseconds, by version 1 or 2 of control groups.
USAGE = {"cpuacct.usage": 1e9, "cpu.stat": 1e6}
RECEIVED = "cat /sys/class/net/eth0/statistics/rx_bytes"
# The files of layers never change: hard links. The rest is the engine's own.
COPY = (
    "cp -al /from/overlay2 /to/ && cd /from && find . -mindepth 1 -maxdepth 1 ! -name overlay2 -exec cp -a {} /to/ ';'"
)
ENSURE = (
    "import sys; from pathlib import Path; from tridock.cluster.settings import load_cluster; "
    "from tridock.ops.hosts.hosts import Hosts; "
    "from tridock.ops.hosts.facts import read_states; "
    "from tridock.ops.image.ensure import ensure_image, wanted_image; "
    "hosts = Hosts(load_cluster(Path(sys.argv[1]))); "
    "ensure_image(hosts, wanted_image(hosts.cluster, read_states(hosts)))"
)


def docker(*arguments: str) -> str:
    """Runs the docker command; its failure is ours."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"docker {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


class Hosts:
    """Containers that play Docker hosts, and the operator's files for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id"], check=True)
        docker("network", "create", NAME)
        variables = [name for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ]
        arguments = [word for name in variables for word in ("--build-arg", name)]
        docker("build", "--quiet", *arguments, "--tag", f"{NAME}:host", str(ROOT / "tests/integration/docker_host"))

    def start(self, name: str) -> None:
        public = (self.folder / "id.pub").read_text().strip()
        options = ["--hostname", name, "--network", NAME, "--volume", f"{NAME}-{name}:/var/lib/docker", *NESTED]
        docker(
            "run", "--detach", "--name", f"{NAME}-{name}", *options, "--env", f"AUTHORIZED_KEY={public}", f"{NAME}:host"
        )
        while subprocess.run(
            ["docker", "exec", f"{NAME}-{name}", "docker", "version"], capture_output=True, check=False
        ).returncode:
            time.sleep(0.5)
        self.names.append(name)

    def copy_of(self, first: str, name: str) -> None:
        """Another host with the disk of one that is stopped."""
        root = Path(docker("info", "--format", "{{.DockerRootDir}}"))  # hard links do not cross mounts
        docker("volume", "create", f"{NAME}-{name}")
        script = COPY.replace("/from", f"/root/volumes/{NAME}-{first}/_data").replace(
            "/to", f"/root/volumes/{NAME}-{name}/_data"
        )
        docker("run", "--rm", "--volume", f"{root}:/root", "--entrypoint", "sh", f"{NAME}:host", "-c", script)

    def write_cluster(self) -> Path:
        address = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        known, config = [], []
        for name in self.names:
            ip = docker("inspect", "--format", address, f"{NAME}-{name}")
            key = docker("exec", f"{NAME}-{name}", "cut", "-d", " ", "-f1,2", "/etc/ssh/ssh_host_ed25519_key.pub")
            known.append(f"{ip} {key}\n")
            config.append(f"Host {name}\n  HostName {ip}\n")
        (self.folder / "known_hosts").write_text("".join(known))
        config.append(f"Host *\n  User {USER}\n  IdentityFile {self.folder}/id\n  IdentityAgent none\n")
        config.append(f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile none\n")
        (self.folder / "ssh_config").write_text("".join(config))
        hostfile = self.folder / "bench"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in self.names))
        settings = {"image": IMAGE, "ssh": {"config_file": f"{self.folder}/ssh_config", "max_connections": 16}}
        (self.folder / "bench.yaml").write_text(json.dumps(settings))
        return hostfile

    def received(self) -> int:
        return sum(int(docker("exec", f"{NAME}-{name}", "sh", "-c", RECEIVED)) for name in self.names)

    def sent(self) -> int:
        """Bytes that this machine sent to the hosts."""
        return int(Path(f"/sys/class/net/{self.bridge}/statistics/tx_bytes").read_text())

    @property
    def bridge(self) -> str:
        return f"br-{docker('network', 'inspect', '--format', '{{.Id}}', NAME)[:12]}"

    def processor_seconds(self) -> list[float]:
        """Of each host so far."""
        found = []
        for name in self.names:
            ident = docker("inspect", "--format", "{{.Id}}", f"{NAME}-{name}")
            # Not Path.glob, which fails where another container ends meanwhile.
            folders = [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup") if ident in folder]
            path = next(folder / file for file in USAGE for folder in folders if (folder / file).exists())
            found.append(int(re.findall(r"\d+", path.read_text())[0]) / USAGE[path.name])
        return found

    def remove(self) -> None:
        containers = docker("ps", "--all", "--quiet", "--filter", f"name={NAME}-").split()
        volumes = docker("volume", "ls", "--quiet", "--filter", f"name={NAME}-").split()
        for argv in (
            ["rm", "--force", *containers],
            ["volume", "rm", *volumes],
            ["network", "rm", NAME],
            ["image", "rm", IMAGE, f"{NAME}:host"],
        ):
            subprocess.run(["docker", *argv], capture_output=True, check=False)


def operate(hosts: Hosts, hostfile: Path) -> None:
    """Brings the image with the operator's settings; a failure is ours."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(hosts.folder / "cache"), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", ENSURE, str(hostfile)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def bring(hosts: Hosts, what: str) -> None:
    """Brings the image to every host that lacks it, and prints a line."""
    hostfile = hosts.write_cluster()
    before, sent = hosts.received(), hosts.sent()
    used, own = hosts.processor_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    operate(hosts, hostfile)
    seconds = time.monotonic() - began
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    operator = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
    each = [after - earlier for after, earlier in zip(hosts.processor_seconds(), used, strict=True)]
    megabytes = (hosts.received() - before) / 1e6
    count = len(hosts.names)
    uplink = (hosts.sent() - sent) / 1e6
    columns = (
        f"{count:5} {seconds:8.1f} {uplink:8.1f} {megabytes:8.1f} {operator:9.1f} {max(each):8.1f} {sum(each):6.1f}"
    )
    print(f"{what:28} {columns}", flush=True)


def edited_image(folder: Path) -> None:
    """The image of this folder with another line in one module of tridock/."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for kept in ("locks/wheels", "upstream"):
        if (ROOT / kept).is_dir():
            shutil.copytree(ROOT / kept, folder / kept, dirs_exist_ok=True)
    with (folder / "tridock/command.py").open("a") as file:
        file.write(f"# {time.time()}\n")
    argv = ["tools/build-image.sh", "cpu", "", IMAGE]
    done = subprocess.run(
        argv, cwd=folder, env={**os.environ, "KEEP_COMPOSE": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def edits(hosts: Hosts, count: int, repeats: int) -> None:
    """The whole image to one host, then edits of one line to many."""
    edited_image(Path(tempfile.mkdtemp(dir=hosts.folder)))
    hosts.start("host-01")
    bring(hosts, "the whole image, first time")
    docker("stop", f"{NAME}-host-01")
    others = [f"host-{number:02}" for number in range(2, count + 1)]
    for other in others:
        hosts.copy_of("host-01", other)
    docker("start", f"{NAME}-host-01")
    for other in others:
        hosts.start(other)
    for _ in range(repeats):
        edited_image(Path(tempfile.mkdtemp(dir=hosts.folder)))
        bring(hosts, "an edit of one line")
    bring(hosts, "nothing to bring")


def main() -> None:
    """Prints a line a transfer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        hosts = Hosts(Path(name))
        try:
            print("what                         hosts  seconds  MB sent  MB rcvd  operator  busiest  hosts")
            edits(hosts, arguments.hosts, arguments.repeats)
        finally:
            hosts.remove()


if __name__ == "__main__":
    main()
