"""The queue and the live page over ssh, as an operator has them: runs that wait on two Docker hosts."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

from tests.integration.rack import CLUSTER, Rack, Up
from tests.integration.support import wait_until
from tests.patience import STEP_S

HOSTS = f"--hosts hostfiles/{CLUSTER}"
LINES = "for i in 1 2 3; do echo iteration=$i loss=$((9 - i)).5; done; sleep 9999"
"""A program that trains nothing: torch takes seconds to import on each rank."""


def start(rack: Rack, task: str, *arguments: str) -> tuple[str, str]:
    """The id of a run that is put into the queue, and what is printed."""
    done = rack.fab(task, "--queue", "--detach", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^run (\S+): ", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1], done.stdout


def states(rack: Rack) -> dict[str, str]:
    runs = json.loads(rack.fab("runs", "--json").stdout)["runs"]
    return {run["run_id"]: run["state"] for run in runs}


def get(address: str, method: str = "GET") -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=STEP_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""


def watched(rack: Rack, run_id: str) -> None:
    """`fab watch` shows what the run has come to; nothing listens on the hosts for it, and nothing can be changed."""
    listening = "ss -Hltn | awk '{print $4}' | sort"
    before = rack["host-a"].sh(listening)
    with rack.attached("watch", "--run", run_id) as terminal:
        wait_until(lambda: "metrics     " in terminal.text(), "the page is there")
        address = re.search(r"^page +(http://127\.0\.0\.1:\d+/\S+/)$", terminal.text(), re.MULTILINE)
        assert address is not None, terminal.text()

        def shown() -> dict[str, Any]:
            runs: list[dict[str, Any]] = json.loads(get(f"{address[1]}data")[1])
            return runs[0] if runs else {}

        wait_until(lambda: shown().get("iteration") == 3, "the page has the run's records")
        assert (shown()["run"], shown()["state"]) == (run_id, "running")
        assert shown()["curves"]["loss"] == [[1, 8.5], [2, 7.5], [3, 6.5]]
        assert rack["host-a"].sh(listening) == before
        assert f'tridock_loss{{run="{run_id}"}} 6.5' in get(f"{address[1]}metrics")[1].decode()
        assert (get(address[1], "POST")[0], get(f"{address[1]}../data")[0]) == (501, 404)
        assert terminal.interrupt() == 0, terminal.text()


def test_runs_wait_for_the_slots_of_others(rack_up: Up) -> None:
    rack = rack_up.rack
    command = ("--workdir", "hostfiles", "--metrics", "key=value", "--", "sh", "-c", LINES)
    first, _ = start(rack, "run", "--name", "first", *command)
    second, printed = start(rack, "launch", "--config", "configs/tiny.yaml")
    assert printed.splitlines()[-3:] == [
        f"queued: it waits for {first}",
        f"See the queue with: fab status {HOSTS}",
        f"Remove it with:     fab cancel {HOSTS} --run {second}",
    ]
    third, printed = start(rack, "run", "--name", "third", "--workdir", "hostfiles", "--", "true")
    assert f"queued: it waits for {first}; {second}\n" in printed
    status = rack.fab("status").stdout
    assert [line.split("│")[1].strip() for line in status.splitlines() if second in line] == [second, second, third]
    assert states(rack) | {first: "running", second: "ready", third: "ready"} == states(rack)
    watched(rack, first)

    removed = rack.fab("cancel", "--run", second)
    assert (removed.returncode, removed.stdout) == (0, f"removed {second} from the queue\n")
    assert rack.fab("cancel", "--run", first).returncode == 2
    assert rack.fab("stop", "--run", first).returncode == 0
    # Nobody asks for it: the supervisor of the run that has ended starts the next.
    node = f"docker exec tridock-{CLUSTER} cat /workspace/runs/{third}/exit_code"
    wait_until(lambda: rack["host-a"].execute(node).stdout == "0\n", "the last run is done")
    assert states(rack) | {first: "stopped", second: "stopped", third: "done"} == states(rack)
