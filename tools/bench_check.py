"""`make bench-check`: how long `fab check` takes on a cluster of many nodes, all of them containers of this machine.

They share this machine's cores, as real nodes do not: beside the time on the clock it prints the processor time of the
operator's side, of the head and of the busiest other node. Their sum is what a cluster of real machines would take if
none of the three ever worked while another did.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = "bench-check"
MODEL = "node-2"
# Nanoseconds, by version 1 of control groups or by version 2.
USAGE = "cat cpuacct/cpuacct.usage 2>/dev/null || awk '/^usage_usec/ { printf \"%.0f\", $2 * 1000 }' cpu.stat"


def project(folder: Path, nodes: list[str]) -> None:
    """A folder in which `fab up` makes so many nodes, each as the twin's second is made."""
    for name in ("fabfile.py", "tridock", "configs", "data", "locks", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("runs", "hostfiles"):
        (folder / name).mkdir()
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services: dict[str, Any] = compose["services"]
    text = json.dumps(services[MODEL])
    services |= {node: json.loads(text.replace(MODEL, node)) for node in nodes}
    (folder / "docker-compose.yml").write_text(yaml.safe_dump(compose))
    (folder / "hostfiles" / CLUSTER).write_text("".join(f"{node} slots=1\n" for node in nodes))
    settings = (ROOT / "hostfiles" / "twin.yaml").read_text()
    (folder / "hostfiles" / f"{CLUSTER}.yaml").write_text(settings)


def fab(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a task there; its failure is ours."""
    argv = [str(Path(sys.executable).with_name("fab")), *arguments, "--hosts", f"hostfiles/{CLUSTER}"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def processor_seconds(containers: dict[str, str]) -> dict[str, float]:
    """Of each node so far."""
    used = {}
    for node, container in containers.items():
        said = subprocess.run(
            ["docker", "exec", "--workdir", "/sys/fs/cgroup", container, "sh", "-c", USAGE],
            capture_output=True,
            text=True,
            check=True,
        )
        used[node] = int(said.stdout) / 1e9
    return used


def containers_of(folder: Path, nodes: list[str]) -> dict[str, str]:
    """By their service: the nodes' containers."""
    argv = ["docker", "ps", "--filter", f"label=com.docker.compose.project.working_dir={folder}"]
    argv += ["--format", '{{.Label "com.docker.compose.service"}} {{.ID}}']
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    found = dict(line.split() for line in said.splitlines())
    return {node: found[node] for node in nodes}


def main() -> None:
    """Prints a line a check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print("nodes  on the clock  operator    head  busiest other  sum (seconds, medians)")
    for count in arguments.nodes:
        nodes = [f"node-{number}" for number in range(1, count + 1)]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            project(folder, nodes)
            try:
                fab(folder, "up")
                containers = containers_of(folder, nodes)
                taken = [one_check(folder, containers) for _ in range(arguments.repeats)]
            finally:
                fab(folder, "down", "--force")
        clock, operator, head, other = (statistics.median(column) for column in zip(*taken, strict=True))
        print(
            f"{count:5} {clock:13.1f} {operator:9.1f} {head:7.1f} {other:14.1f} {operator + head + other:4.1f}",
            flush=True,
        )


def one_check(folder: Path, containers: dict[str, str]) -> tuple[float, float, float, float]:
    """Seconds on the clock, and of processors: the operator's, the head's, the busiest other node's."""
    before, began = processor_seconds(containers), time.monotonic()
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    fab(folder, "check")
    seconds, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    operator = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
    used = {node: after - before[node] for node, after in processor_seconds(containers).items()}
    head, *others = used.values()
    return seconds, operator, head, max(others)


if __name__ == "__main__":
    main()
