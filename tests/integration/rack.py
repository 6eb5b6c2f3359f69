"""A rack for tests: two containers that each play a Docker host (own dockerd, own sshd), and a project that uses them.

The operator is this machine: `fab` runs here, in a copy of the working tree, and reaches the hosts over ssh as it would
in a rack. Everything has a name of its own and is removed at the end.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tests.integration.support import HOST_IMAGE, ROOT, execute, own_name, pause, succeed, wait_until
from tests.patience import STEP_S

USER = "trainer"
UID = 1234
CLUSTER = "rack"
SHARED = "/shared"  # one file system that both hosts see
WORKDIR = f"/home/{USER}/tridock/{CLUSTER}"
PROGRAMS = Path(sys.executable).parent

# What lets a dockerd run inside a container without --privileged.
_NESTED = (
    *("--cap-add", "ALL", "--cap-drop", "SYS_RESOURCE", "--shm-size", "2g"),
    *(word for what in ("seccomp", "apparmor", "systempaths") for word in ("--security-opt", f"{what}=unconfined")),
    *("--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw"),
)

# Another Docker on the hosts: a folder with its programs (dockerd, docker, containerd, containerd-shim-runc-v2, runc,
# docker-proxy), static or for Debian 12; and its image store, `overlay2` or `containerd` (default: that Docker's own).
HOST_DOCKER = os.environ.get("TRIDOCK_HOST_DOCKER")
HOST_STORE = os.environ.get("TRIDOCK_HOST_STORE")

TINY = {
    "name": "tiny",
    "model": {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 64,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "parallel": {"strategy": "zero", "zero_stage": 1},
    "batch": {"micro_batch_size": 4},
    "data": {"data_path": "data/tiny/text_document", "split": "80,10,10"},
    "optimizer": {"lr": 1.0e-2, "lr_warmup_iters": 2},
    "precision": "fp32",
    "train": {"train_iters": 12, "log_interval": 1},
    # DeepSpeed's imports torch three times more; tests of its own way choose it.
    "launch": {"launcher": "ssh"},
}  # fmt: skip


def build_host_image(image: str = HOST_IMAGE, store: str | None = HOST_STORE) -> None:
    """Builds the image of a Docker host, with Debian's Docker or another one. The engine unpacks with pigz, which
    Docker's own packages recommend. Other workers may start hosts of it, or build it, meanwhile."""
    debian = image if HOST_DOCKER is None else f"{HOST_IMAGE}-debian"
    proxies = [n for n in ("http_proxy", "https_proxy", "no_proxy") if n in os.environ]
    arguments = [word for name in proxies for word in ("--build-arg", name)]
    folder = str(ROOT / "tests/integration/docker_host")
    succeed("docker", "build", "--quiet", *arguments, "--tag", debian, folder)
    if HOST_DOCKER is not None:
        features = {} if store is None else {"features": {"containerd-snapshotter": store == "containerd"}}
        install = f"mkdir -p /etc/docker && echo '{json.dumps(features)}' >/etc/docker/daemon.json"
        recipe = f"FROM {debian}\nCOPY . /usr/local/bin/\nRUN {install}\n"
        succeed("docker", "build", "--quiet", "--tag", image, "--file", "-", HOST_DOCKER, input=recipe)


def copy_tree(folder: Path) -> Path:
    """The working tree as a clean clone of it would be: what git tracks, and what it would be given to track."""
    listed = succeed("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in sorted(set(listed.split("\0")) - {""}):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass
class RackHost:
    """One host: a container of the engine here, with an engine of its own."""

    name: str
    container: str
    address: str = ""

    def execute(self, script: str, *arguments: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        return execute("docker", "exec", "--user", user, self.container, "bash", "-c", script, "bash", *arguments)

    def sh(self, script: str, *arguments: str, user: str = "root") -> str:
        """Runs a script that has to succeed, past ssh and Tridock."""
        done = self.execute(script, *arguments, user=user)
        assert done.returncode == 0, f"{self.name}: {script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def containers(self) -> dict[str, str]:
        """Names and states of the containers on this host's engine."""
        lines = self.sh("docker ps --all --format '{{.Names}} {{.State}}'").splitlines()
        return dict(line.split(" ", 1) for line in lines)  # type: ignore[arg-type]

    def image_id(self, image: str) -> str:
        return self.execute("docker image inspect --format '{{.Id}}' \"$1\"", image).stdout.strip()

    def load(self, image: str) -> None:
        """Gives it an image of the engine here, past ssh and Tridock."""
        with subprocess.Popen(("docker", "save", image), stdout=subprocess.PIPE) as save:
            succeed("docker", "exec", "--interactive", self.container, "docker", "load", stdin=save.stdout)
        assert save.returncode == 0

    def processes(self, run_id: str, containing: str = "") -> list[int]:
        """The processes of a run, as this host sees them."""
        script = """
            for environ in $(grep -lzsx "TRIDOCK_RUN_ID=$1" /proc/[0-9]*/environ); do
                process=${environ%/environ}
                [ -z "$2" ] || tr '\\0' ' ' 2>/dev/null <"$process/cmdline" | grep -qE -- "$2" || continue
                [ "$(awk '{print $3}' "$process/stat" 2>/dev/null)" = Z ] || echo "${process#/proc/}"
            done"""
        return [int(line) for line in self.execute(script, run_id, containing).stdout.split()]

    def ranks(self, run_id: str) -> list[int]:
        return self.processes(run_id, r"^[^ ]*python[^ ]* -u -m tridock\.train ")

    def signal(self, name: str, pids: Sequence[int]) -> None:
        self.sh(f"kill -{name} {' '.join(map(str, pids))}")

    @contextmanager
    def without(self, path: str) -> Iterator[None]:
        """While a file is not where it belongs."""
        self.sh('mv "$1" "$1.gone"', path)
        try:
            yield
        finally:
            self.sh('mv "$1.gone" "$1"', path)

    @contextmanager
    def small_disk(self, path: str, size: str, filled: bool = False, node: str = "") -> Iterator[None]:
        """While a folder, with ``node`` of this container, is a disk of this size, of the ssh user's."""
        inside = f"nsenter -m -t $(docker inspect --format '{{{{.State.Pid}}}}' {node}) " if node else ""
        script = f'mkdir -p "$1"; mount -t tmpfs -o size={size},mode=777 tmpfs "$1"'
        script += '; dd if=/dev/zero of="$1/filler" bs=4k 2>/dev/null || true' if filled else ""
        self.sh(f'{inside}sh -c {shlex.quote(script)} sh "$1"', path)
        try:
            yield
        finally:
            self.sh(f'{inside}umount "$1"', path)


@dataclass
class Rack:
    """Two hosts, and the project of the operator who uses them."""

    name: str
    folder: Path
    hosts: dict[str, RackHost] = field(default_factory=dict)

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def image(self) -> str:
        """A name of this rack's own: the usual one may come to mean another image while the tests run."""
        return f"{self.name}:cpu"

    @property
    def network(self) -> str:
        return self.name

    def __getitem__(self, name: str) -> RackHost:
        return self.hosts[name]

    def __iter__(self) -> Iterator[RackHost]:
        return iter(self.hosts.values())

    # ---- the operator ----

    def environment(self, **changes: str) -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "COMPOSE_FILE")}
        path = f"{PROGRAMS}:{keep['PATH']}"
        own = {"PYTHONPATH": str(self.project), "TMPDIR": str(self.temporary), "XDG_CACHE_HOME": f"{self.folder}/cache"}
        return {**keep, "PATH": path, **own, **changes}

    @property
    def temporary(self) -> Path:
        folder = self.folder / "tmp"
        folder.mkdir(exist_ok=True)
        return folder

    def fab(
        self, task: str, *arguments: str, hosts: str = f"hostfiles/{CLUSTER}", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        argv = [str(PROGRAMS / "fab"), task, *(["--hosts", hosts] if hosts else []), *arguments]
        return execute(*argv, cwd=self.project, env=self.environment(**environment))

    @contextmanager
    def attached(self, task: str, *arguments: str, hosts: str = f"hostfiles/{CLUSTER}") -> Iterator[Attached]:
        """`fab` in a session of its own, as in a terminal; whatever is left of it is killed at the end."""
        output = self.folder / f"{uuid.uuid4().hex}.log"
        argv = [str(PROGRAMS / "fab"), task, "--hosts", hosts, *arguments]
        with output.open("wb") as file:
            process = subprocess.Popen(
                argv, cwd=self.project, env=self.environment(), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield Attached(process, output)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def write_cluster(self, file: str, hostfile: str | None = None, **settings: object) -> str:
        """A hostfile with settings beside it; returns its path from the project's folder."""
        base = {
            "name": file,
            "image": self.image,
            "ssh": {"config_file": str(self.folder / "ssh_config")},
            "nodes": {host.name: {"address": host.address} for host in self},
            # An engine inside a container may not raise its containers' limits.
            "container": {"gpus": "none", "ulimits": {}},
            "env": {"OMP_NUM_THREADS": "1"},
        }
        lines = hostfile if hostfile is not None else "".join(f"{name} slots=1\n" for name in self.hosts)
        (self.project / "hostfiles" / file).write_text(lines)
        merged = {key: value for key, value in {**base, **settings}.items() if value is not None}
        (self.project / "hostfiles" / f"{file}.yaml").write_text(json.dumps(merged))  # JSON is YAML too
        return f"hostfiles/{file}"

    def write_ssh_config(self, name: str = "ssh_config", known: Mapping[str, str] | None = None) -> str:
        """The operator's ssh configuration; ``known`` replaces the host keys on file."""
        keys = {host.name: host.sh("cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub").strip() for host in self}
        keys = keys if known is None else dict(known)
        known_hosts = self.folder / f"{name}.known_hosts"
        known_hosts.write_text("".join(f"{self.hosts[host].address} {key}\n" for host, key in keys.items()))
        blocks = [f"Host {host.name}\n  HostName {host.address}\n" for host in self]
        common = f"""\
            Host *
              User {USER}
              IdentityFile {self.folder}/id
              IdentityAgent none
              UserKnownHostsFile {known_hosts}
              GlobalKnownHostsFile none
            """
        (self.folder / name).write_text("".join(blocks) + textwrap.dedent(common))
        return str(self.folder / name)

    # ---- the hosts ----

    def node(self, host: str, *arguments: str) -> str:
        """A command inside a node's container."""
        quoted = " ".join(f"'{word}'" for word in arguments)
        return self[host].sh(f"docker exec --user {UID}:{UID} tridock-{CLUSTER} {quoted}")

    def start(self, *, with_image: bool = False) -> None:
        """Starts both hosts, perhaps with the rack's image, past ssh and Tridock."""
        succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "id"))
        succeed("docker", "network", "create", self.network)
        self.add("host-a")
        if with_image:
            self["host-a"].load(self.image)
            self._copy_store("host-a", "host-b")
        self.add("host-b")
        self.write_ssh_config()

    def _copy_store(self, source: str, target: str) -> None:
        """Gives a host that is to start what another one's engine has; to unpack the image once more takes a minute.

        Layers become hard links: no engine writes into them.
        """
        script = 'cd "/v/$1/_data" && cp -al overlay2 "/v/$2/_data/" && find . -mindepth 1 -maxdepth 1 ! -name overlay2'
        script += ' ! -name engine-id -exec cp -a {} "/v/$2/_data/" \\;'
        names = [f"{self.name}-{name}" for name in (source, target)]
        succeed("docker", "volume", "create", names[1])
        place = Path(succeed("docker", "volume", "inspect", "--format", "{{.Mountpoint}}", names[0]).strip())
        pause(names[0])
        options = ("--rm", "--volume", f"{place.parents[1]}:/v", "--entrypoint", "sh")
        succeed("docker", "run", *options, HOST_IMAGE, "-c", script, "sh", *names)
        succeed("docker", "unpause", names[0])

    def add(self, *names: str, image: str = HOST_IMAGE) -> None:
        """Starts more hosts; the operator's ssh configuration does not know them yet."""
        public = (self.folder / "id.pub").read_text().strip()
        for name in names:
            host = self.hosts[name] = RackHost(name, f"{self.name}-{name}")
            options = ["--hostname", name, "--network", self.network, "--volume", f"{host.container}:/var/lib/docker"]
            options += ["--volume", f"{self.network}:{SHARED}"]
            succeed(
                "docker", "run", "--detach", "--name", host.container, *options, *_NESTED,
                "--env", f"AUTHORIZED_KEY={public}", image,
            )  # fmt: skip
        for host in map(self.hosts.__getitem__, names):
            wait_until(lambda host=host: host.execute("docker version").returncode == 0, "its engine answers")
            address = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
            host.address = succeed("docker", "inspect", "--format", address, host.container).strip()

    def take_away(self, name: str) -> None:
        host = self.hosts.pop(name)
        execute("docker", "rm", "--force", "--volumes", host.container)
        execute("docker", "volume", "rm", "--force", host.container)

    def write_project(self) -> None:
        copy_tree(self.project)
        (self.project / "configs" / "tiny.yaml").write_text(json.dumps(TINY))
        self.write_cluster(CLUSTER)
        write_data(self.project / "data" / "tiny")

    def remove(self) -> None:
        names = [host.container for host in self]
        execute("docker", "rm", "--force", "--volumes", *names)
        execute("docker", "volume", "rm", "--force", self.network, *names)
        execute("docker", "network", "rm", self.network)
        execute("docker", "image", "rm", self.image)


@dataclass
class Attached:
    """A `fab` that follows a run."""

    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=STEP_S)


def write_data(folder: Path) -> None:
    """A data set that a tiny model learns in a few steps: a row that always counts up."""
    folder.mkdir(parents=True)
    with IndexedDatasetWriter(folder / "text_document", vocab_size=64) as writer:
        for start in range(400):
            writer.add_document([(start + step) % 64 for step in range(64)])


@pytest.fixture(scope="session")
def rack(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Two Docker hosts without any node yet, and a project."""
    build_host_image()
    made = Rack(own_name(), tmp_path_factory.mktemp("rack"))
    try:
        succeed("docker", "tag", cpu_image, made.image)
        # test_docker_hosts.py, on the other rack, sees the image travel.
        made.start(with_image="test_doctor.py" in os.environ["PYTEST_CURRENT_TEST"])
        made.write_project()
        yield made
    finally:
        made.remove()


@dataclass
class Up:
    """The first `tridock up` of the session."""

    rack: Rack
    output: str
    seconds: float


@pytest.fixture(scope="session")
def rack_up(rack: Rack) -> Up:
    """The rack with its nodes up: the image travels once for all tests."""
    started = time.monotonic()
    done = rack.fab("up")
    assert done.returncode == 0, done.stdout + done.stderr
    brought = rack.fab("data", "--path", "data/tiny")
    assert brought.returncode == 0, brought.stderr
    return Up(rack, done.stdout, time.monotonic() - started)
