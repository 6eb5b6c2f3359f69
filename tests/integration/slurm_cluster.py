"""A Slurm cluster for tests: Debian's Slurm in four containers of the twin's image, a controller and three nodes.

Everything has a name of its own and is removed at the end. `/shared` is the file system that all machines see.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration import rack
from tests.integration.support import ROOT, execute, own_name, succeed, wait_until
from tests.patience import WORK_S

NODES = ("n1", "n2", "n3")
USER = "trainer"
SHARED = "/shared"
DATA = """
from pathlib import Path
import numpy as np
from tridock.data.dataset.indexed_dataset import write_index
tokens = np.add.outer(np.arange(400), np.arange(64)) % 64
tokens.astype("<u2").tofile("data/tiny/text_document.bin")
write_index(Path("data/tiny/text_document.idx"), np.dtype("<u2"), np.full(400, 64), np.arange(401))
"""
TINY = rack.TINY | {"model": rack.TINY["model"] | {"num_layers": 2}, "parallel": {"strategy": "ddp"}}
SITE = {"gpus_per_node": 1, "gpu_request": "none", "cpus_per_node": 2, "time": "30", "signal_lead": 60}


@dataclass(frozen=True)
class Job:
    """A job of one run, and the run's folder on the cluster."""

    id: str
    folder: str


@dataclass
class SlurmCluster:
    """The containers, and their user at the login node."""

    name: str

    @property
    def image(self) -> str:
        return f"{self.name}:slurm"

    @property
    def base(self) -> str:
        return f"{self.name}:cpu"

    def container(self, machine: str) -> str:
        return f"{self.name}-{machine}"

    def start(self) -> None:
        succeed("docker", "network", "create", self.name)
        for machine in ("login", *NODES):
            role = "controller" if machine == "login" else "node"
            options = ["--hostname", machine, "--network", self.name, "--network-alias", machine, "--no-healthcheck"]
            options += ["--volume", f"{self.name}:{SHARED}", "--env", "OMP_NUM_THREADS=1"]
            succeed("docker", "run", "--detach", "--name", self.container(machine), *options, self.image, role)
        succeed("docker", "exec", self.container("login"), "chown", f"{USER}:{USER}", SHARED)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        asked = "sinfo --noheader --format=%D:%t"
        wait_until(lambda: self.execute(asked).stdout == "3:idle\n", "all nodes are idle")

    def write_workspace(self) -> None:
        self.write("tiny.yaml", json.dumps(TINY))  # JSON is YAML too
        self.write("site.yaml", json.dumps(SITE))
        self.succeed(f"mkdir -p data/tiny && python -c '{DATA}'")

    def write(self, name: str, text: str) -> None:
        self.succeed(f"cat >{name}", input=text)

    def clear(self) -> None:
        """Takes away what a test has left in the queue."""
        self.execute("scancel --me")
        wait_until(lambda: self.execute("squeue --noheader").stdout == "", "the queue is empty")

    def remove(self) -> None:
        execute("docker", "rm", "--force", *map(self.container, ("login", *NODES)))
        execute("docker", "volume", "rm", "--force", self.name)
        execute("docker", "network", "rm", self.name)
        execute("docker", "image", "rm", self.image, self.base)

    # ---- the user ----

    def execute(
        self, line: str, machine: str = "login", folder: str = SHARED, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """A line of shell, as the user would type it."""
        arguments = ["--interactive", "--user", USER, "--workdir", folder, "--env", f"HOME=/home/{USER}"]
        arguments += ["--env", "COLUMNS=160", self.container(machine), "bash", "-c", line]
        return execute("docker", "exec", *arguments, **options)

    def succeed(self, line: str, **options: Any) -> str:
        done = self.execute(line, **options)
        assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def administer(self, line: str) -> None:
        """A line of shell of Slurm's administrator."""
        succeed("docker", "exec", self.container("login"), "bash", "-c", line)

    def submit(self, *arguments: str, config: str = "tiny.yaml") -> Job:
        out = self.succeed(f"tridock slurm submit {config} --profile site.yaml {' '.join(arguments)}")
        found = re.fullmatch(r"job (\d+)\nrun (\S+); folder (/shared/runs/\2)\n", out)
        assert found, out
        return Job(found[1], found[3])

    def read(self, job: Job, name: str) -> str:
        return self.execute(f"cat {job.folder}/{name}").stdout

    def lines(self, job: Job, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(job, name).splitlines() if line.endswith("}")]

    def events(self, job: Job, name: str) -> list[dict[str, Any]]:
        return [event for event in self.lines(job, "events.jsonl") if event["event"] == name]

    def losses(self, job: Job) -> list[float]:
        return [record["loss"] for record in self.lines(job, "metrics.jsonl") if "split" not in record]

    def until(self, condition: Any, what: str, job: Job) -> None:
        try:
            wait_until(condition, what, WORK_S)
        except AssertionError as error:
            output = self.execute(f"cat {job.folder}/logs/slurm*; cat {job.folder}/events.jsonl; squeue; sinfo").stdout
            logs = [execute("docker", "logs", "--tail", "40", self.container(name)).stderr for name in ("login", "n1")]
            raise AssertionError("\n".join([str(error), output[-6000:], *logs])) from None

    def has_ended(self, job: Job) -> bool:
        done = self.execute(f"squeue --noheader --jobs={job.id}")
        return done.stdout == "" and "timed out" not in done.stderr  # the controller may be looking for a dead node

    @contextmanager
    def slowed(self, *machines: str) -> Iterator[None]:
        """While a run on these machines only passes its time: it leaves this machine's processors to others."""
        names = [self.container(machine) for machine in machines]
        succeed("docker", "update", "--cpu-quota", "20000", *names)
        try:
            yield
        finally:
            succeed("docker", "update", "--cpu-quota", "-1", *names)

    def wait(self, job: Job) -> int:
        """Until the job has left the queue; the run's exit code."""
        self.until(lambda: self.has_ended(job), "the job has ended", job)
        return int(self.read(job, "exit_code") or -1)

    def ranks(self, job: Job, machine: str) -> list[int]:
        """The processes of a run's ranks on a node."""
        run_id = Path(job.folder).name
        script = f"""
            for process in /proc/[0-9]*; do
                grep -qzsx "TRIDOCK_RUN_ID={run_id}" "$process/environ" || continue
                tr '\\0' ' ' 2>/dev/null <"$process/cmdline" | grep -qE '^[^ ]*python[^ ]* -u -m tridock' || continue
                echo "${{process#/proc/}}"
            done"""
        return [int(line) for line in self.execute(script, machine).stdout.split()]


@pytest.fixture(scope="session")
def slurm_cluster(cpu_image: str) -> Iterator[SlurmCluster]:
    """The cluster with an experiment, its data and a site's profile in the user's folder."""
    cluster, megatron = SlurmCluster(own_name()), os.environ.get("TRIDOCK_MEGATRON")
    try:
        if megatron:
            arguments = ("FLAVOR=cpu", f"IMAGE={cluster.base}", f"MEGATRON={megatron}")
            succeed("make", "image", *arguments, cwd=ROOT)
        else:
            succeed("docker", "tag", cpu_image, cluster.base)
        options = [f"--build-arg=BASE={cluster.base}"]
        options += [f"--build-arg={name}" for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ]
        folder = str(ROOT / "tests" / "integration" / "slurm")
        succeed("docker", "build", "--quiet", *options, "--tag", cluster.image, folder)
        cluster.start()
        cluster.write_workspace()
        yield cluster
    finally:
        cluster.remove()
