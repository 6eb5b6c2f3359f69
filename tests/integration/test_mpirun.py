"""mpirun on two nodes of a wrapped image: Debian's Open MPI, and the ring of mpi4py as a program of others."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from tests.integration.support import execute, own_name, succeed, wait_until
from tests.integration.test_programs import NODES, Twin
from tests.integration.test_wrapped_image import BASE

# tests/unit/launchers/test_programs.py has its command lines.
pytestmark = pytest.mark.full

PACKAGES = "openmpi-bin python3-mpi4py"
RING = ("mpirun", "--oversubscribe", "python3", "-m", "mpi4py.bench", "ringtest", "-n", "8")
RANK = "^python3 -m mpi4py.bench"


@pytest.fixture(scope="module")
def twin(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    made, own = Twin(tmp_path_factory.mktemp("twin")), f"{own_name()}-mpi:1"
    install = f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {PACKAGES}"
    options = [f"--build-arg={name}" for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ]
    file = f"FROM {BASE}\nRUN {install}\n"
    succeed("docker", "build", "--quiet", *options, "--tag", own, "-", input=file)
    (made.folder / "hostfile").write_text("".join(f"{node} slots=1\n" for node in NODES))
    settings = f"name: {own_name()}\ntransport: compose\nimage: {own}\nwrap: true\nenv: {{DS_ACCELERATOR: cpu}}\n"
    (made.folder / "hostfile.yaml").write_text(settings)
    (made.folder / "code").mkdir()
    (made.folder / "code" / "note").write_text("of the run\n")
    try:
        made.up()
        yield made
    finally:
        made.tridock("down")
        execute("docker", "image", "rm", own, f"localhost/tridock-wrapped/{own}")


def run(twin: Twin, *arguments: str) -> str:
    """The id of a run of the ring with these arguments; its log has its output."""
    options, loops = arguments[:-1], arguments[-1]
    done = twin.tridock("run", "--workdir", "code", "--name", "ring", *options, "--", *RING, "-l", loops)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^run (\S+): ", done.stdout + done.stderr, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return found[1]


def ringing(twin: Twin) -> str:
    """The id of a run that goes round for ever, with a rank on each node."""
    run_id = run(twin, "--detach", "1000000000")
    status = twin.folder / "runs" / run_id / ".heartbeat"
    ranks = lambda: [twin.sh(node, f"pgrep -fc '{RANK}'") for node in NODES]  # noqa: E731
    wait_until(lambda: ranks() == ["1\n", "1\n"] and (status / "agent-node-2").exists(), "two ranks")
    time.sleep(3.0)  # the agents look once a second
    return run_id


def test_it_runs_and_again(twin: Twin) -> None:
    run_id = run(twin, "5")
    log = (twin.folder / "runs" / run_id / "logs" / "launcher.log").read_text()
    assert re.search(r"time for 5 loops = [\d.]+ seconds \(2 processes, 8 bytes\)", log), log
    again = twin.tridock("reproduce", "--run", run_id, "--yes")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "time for 5 loops" in again.stdout
    assert twin.processes(run_id) == ""


def test_a_killed_rank_is_named(twin: Twin) -> None:
    run_id = ringing(twin)
    twin.sh("node-2", f"pkill -9 -f '{RANK}'")
    output = twin.followed(run_id)
    if (
        "rank 1 on node-2 was ended by SIGKILL" not in output
    ):  # the agent did not see the process before mpirun reaped it
        assert "rank 1 on node-2 was the first to end, and its launcher reports an error; " in output
        assert "  cause    rank 1 on node-2 was ended by signal 9 (Killed)\n" in output
        assert "  rule     mpirun-signal (docs/triage.md)\n" in output
    assert twin.processes(run_id) == ""


def test_a_killed_node_is_named(twin: Twin) -> None:
    run_id = ringing(twin)
    succeed("docker", "kill", twin.container("node-2"))
    try:
        assert re.search(r"got exit code \d+, node-2 ", output := twin.followed(run_id)), output
        assert twin.processes(run_id) == ""
    finally:
        twin.up()


def test_stop_leaves_nothing(twin: Twin) -> None:
    run_id = ringing(twin)
    assert twin.processes(run_id) != ""
    done = twin.tridock("stop", "--run", run_id)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: twin.processes(run_id) == "", "no process is left")
