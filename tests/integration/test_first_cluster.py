"""docs/first-cluster.md, line by line, on two Docker hosts over ssh with disks of their own."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.documentation import blocks
from tests.integration.rack import CLUSTER, PROGRAMS, Up
from tests.integration.rack_runs import RUNS, run_id_of
from tests.integration.support import execute, wait_until
from tests.patience import WORK_S

PAGE = "docs/first-cluster.md"


def pattern(line: str) -> str:
    """What a line of the page stands for: … is any text, and the width of a table's columns does not matter."""
    return r"\s+".join(re.escape(word).replace("…", ".*") for word in line.split())


@pytest.mark.full  # test_readme.py and others: its commands; tests/unit/test_docs_commands.py reads it
def test_the_page_is_what_happens(rack_up: Up) -> None:
    rack = rack_up.rack
    shutil.copy(rack.project / f"hostfiles/{CLUSTER}.yaml", rack.project / "hostfile.yaml")
    environment = rack.environment(PATH=f"{PROGRAMS}:{rack.environment()['PATH']}")
    said = ""
    for block in blocks(PAGE):
        if block.language == "text":
            place = 0
            for line in block.text.splitlines():
                found = re.compile(pattern(line)).search(said, place)
                assert found, f"{block}: {line}\nis not in\n{said[place:]}"
                place = found.end()
            continue
        said = ""
        for line in block.text.splitlines():
            if "pkill" in line:  # once there is a checkpoint
                events = f"cat {RUNS}/{run_id_of(rack.project / 'run-id')}/events.jsonl"
                saved = lambda cat=events: "checkpoint_saved" in rack["host-a"].execute(cat).stdout  # noqa: E731
                wait_until(saved, "it has saved", WORK_S)
            done = execute("bash", "-c", line, cwd=rack.project, env=environment)
            said += done.stdout + done.stderr
            assert done.returncode == 0, f"{block}: {line}\n{said}"
    assert (rack.project / "exported/model.safetensors").stat().st_size > 1_000_000
    ids = {run_id_of(rack.project / name) for name in ("run-id", "resumed")}
    resumed = rack.project / "runs" / run_id_of(rack.project / "resumed")
    events = [json.loads(line) for line in (resumed / "events.jsonl").read_text().splitlines()]
    assert events[-1]["iteration"] == 140
    for host in rack:
        assert ids.isdisjoint(host.sh(f"ls {RUNS}").split())
