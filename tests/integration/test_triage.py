"""Faults that take a container: the kernel's own end of a process that has too much memory, a small /dev/shm."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rack import TINY, write_data
from tests.integration.support import Containers, execute, succeed, wait_until
from tests.integration.twin import Twin, two_nodes
from tridock.triage import diagnose
from tridock.triage.facts import Facts

GROWS = """
import os, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, number):
        time.sleep(0.05)
        if os.environ["RANK"] == "1":
            self.kept = [*getattr(self, "kept", ()), bytearray(b"x" * 2**25)]
        return number
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    pass
"""
SILENT = """
import os, time
def waits_for_a_file():
    while not os.path.exists("/workspace/never"):
        time.sleep(1)
waits_for_a_file()
"""
FAILS_ON_REQUEST = """
import os, time
open(f"ready-{os.environ['RANK']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    raise ValueError("as was asked")
time.sleep(9999)
"""


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    with two_nodes(cpu_image, tmp_path_factory.mktemp("twin")) as made:
        yield made


def begun(twin: Twin, program: str, *options: str, **launch: object) -> subprocess.CompletedProcess[str]:
    """Starts a program on both nodes, and follows it."""
    (twin.folder / "code").mkdir(exist_ok=True)
    (twin.folder / "code" / "main.py").write_text(program)
    run = {"name": "own", "engine": "command", "command": ["python", "main.py"], "code": "code", "launch": launch}
    (twin.folder / "run.yaml").write_text(json.dumps(run))
    return twin.tridock("run", "--config", "run.yaml", *options)


def failed(twin: Twin, program: str, **launch: object) -> tuple[str, str]:
    """Runs a program on both nodes to its failure; the run's id, and the output."""
    done = begun(twin, program, **launch)
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    found = re.search(r"^(\S+): the run failed;", output, re.MULTILINE)
    assert found, output
    return found[1], output


def test_the_kernel_kills_a_worker_of_a_program(twin: Twin) -> None:
    """Not the rank, which only raises; its node's counter tells why, in the event, the verdict and the diagnosis."""
    succeed("docker", "update", "--memory", "1g", "--memory-swap", "1g", twin.container("node-2"))
    run_id, output = failed(twin, GROWS)
    events = (twin.folder / "runs" / run_id / "events.jsonl").read_text().splitlines()
    (kills,) = [it for it in map(json.loads, events) if it["event"] == "memory_kills"]
    assert (kills["node"], kills["processes"]) == ("node-2", 1)
    assert re.search(r"rank 1 on node-2 .*; the kernel killed a process for memory on node-2", output), output
    cause = "the memory of the container on node-2 was used up, and the kernel killed a worker of the data loader"
    assert f"  cause    {cause}" in output
    assert "  rule     worker-killed-for-memory (docs/triage.md)" in output


def test_where_a_program_is_silent(twin: Twin) -> None:
    """py-spy reads the ranks in a node's container, without a capability."""
    run_id, output = failed(twin, SILENT, hang_timeout=5)
    silent = r"is silent at \S*main\.py:5 in waits_for_a_file(, as well as 1 other rank)?: no output and no processor"
    assert re.search(silent, output), output
    for rank in (0, 1):
        log = (twin.folder / "runs" / run_id / "logs" / f"rank-{rank}.log").read_text()
        assert 'main.py", line 5 in waits_for_a_file\n' in log


def test_the_kernel_kills(containers: Containers, tmp_path: Path) -> None:
    """A model that the container's memory does not hold: 20 bytes for each of 100 M parameters in 1 GB."""
    write_data(tmp_path / "data" / "tiny")
    model = {**TINY["model"], "num_layers": 32, "hidden_size": 512}  # type: ignore[dict-item]
    train = {**TINY["train"], "save": False, "tensorboard": False}  # type: ignore[dict-item]
    (tmp_path / "large.yaml").write_text(json.dumps({**TINY, "parallel": {}, "model": model, "train": train}))
    options = ["--memory", "1g", "--memory-swap", "1g", "--volume", f"{tmp_path}:/workspace"]
    done = containers.run("tridock", "train", "large.yaml", "--nproc", "1", options=options)
    assert done.returncode == 4, done.stdout + done.stderr
    lines = done.stderr.splitlines()[-6:]
    assert lines[0].startswith("  first    rank 0 on localhost, 20")
    assert lines[1:3] == [
        "  error    was killed by the kernel, out of memory before its first step",
        "  steps    none was logged",
    ]
    assert lines[3].startswith(
        "  cause    localhost ran out of memory, and the kernel killed the rank; the plan expects "
    )
    assert lines[5] == "  rule     oom-killed (docs/triage.md)"


@pytest.mark.full  # tests/unit/node/test_links.py
def test_a_link_that_went_down_is_evidence_beside_the_failure(twin: Twin, cpu_image: str) -> None:
    done = begun(twin, FAILS_ON_REQUEST, "--detach", "--run-id-file", "id")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = (twin.folder / "id").read_text().strip()
    run = twin.folder / "runs" / run_id
    code, agent = run / "code", run / ".heartbeat" / "agent-node-2"  # which notes how often the link went down before
    there = (agent, *(code / f"ready-{rank}" for rank in (0, 1)))
    wait_until(lambda: all(path.exists() for path in there), "the ranks have started, and node-2's agent")
    inside = ("--cap-add", "NET_ADMIN", "--network", f"container:{twin.container('node-2')}", "--entrypoint", "sh")
    flap = "ip link set eth0 down && sleep 2 && ip link set eth0 up"
    succeed("docker", "run", "--rm", *inside, cpu_image, "-c", flap)
    (code / "go").touch()
    output = twin.followed(run_id)
    assert "eth0 of node-2 went down 1 time" in output
    assert "as was asked" in output


LOADER = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, number): return torch.zeros(1 << 20)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    pass
"""


@pytest.mark.full  # tests/unit/ops/checks/test_limits.py
def test_shared_memory_too_small(containers: Containers) -> None:
    """With Docker's option for it; a data loader's workers, as Megatron's, hand their samples over in there."""
    done = execute("docker", "run", "--rm", "--shm-size", "1m", containers.image, "python", "-c", LOADER)
    assert done.returncode != 0
    found = diagnose(Facts(4, launcher=done.stdout + done.stderr))
    assert found.rule == "shared-memory-too-small", done.stderr
    done = execute("docker", "run", "--rm", "--shm-size", "64m", containers.image, "python", "-c", LOADER)
    assert done.returncode == 0, done.stderr
