"""The user's own program that loses a node for good: a spare takes its place, in an image without any Python."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.integration.support import ROOT, own_name, succeed, wait_until
from tests.integration.test_wrapped_image import image, tridock  # noqa: F401  (a fixture)
from tests.patience import WORK_S

pytestmark = pytest.mark.full  # test_moved_runs.py has a spare, test_run.py a program

CONFIG = {
    "name": "mine",
    "engine": "command",
    "command": ["bash", "-c", "echo rank $RANK on $TRIDOCK_NODE; exec sleep 9999"],
    "resume_command": ["bash", "-c", "echo again: rank $RANK of $WORLD_SIZE on $TRIDOCK_NODE: $(cat word)"],
    "code": "code",
    "restart": {"max": 1, "node_timeout": 30},
}


def test_a_spare_takes_the_place_of_a_lost_node(image: str, tmp_path: Path) -> None:  # noqa: F811
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    compose["services"]["node-3"] = json.loads(json.dumps(compose["services"]["node-2"]).replace("node-2", "node-3"))
    (tmp_path / "docker-compose.yml").write_text(yaml.safe_dump(compose))
    (tmp_path / "hostfile").write_text("".join(f"node-{node} slots=1\n" for node in (1, 2, 3)))
    name = own_name()
    settings = f"name: {name}\ntransport: compose\nimage: {image}\nspares: [node-3]\nenv: {{DS_ACCELERATOR: cpu}}\n"
    (tmp_path / "hostfile.yaml").write_text(settings)
    (tmp_path / "run.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "word").write_text("hello")
    command = ("run", "--hosts", "hostfile", "--config", "run.yaml", "--no-check")
    try:
        argv = [sys.executable, "-m", "tridock.cli", *command]
        with (tmp_path / "out").open("w") as out:
            process = subprocess.Popen(argv, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        printed = (tmp_path / "out").read_text
        wait_until(lambda: "node-2: rank 1 on node-2" in printed(), "the program runs")
        containers = succeed("docker", "ps", "--format", "{{.Names}}", "--filter", f"name={name}").split()
        (lost,) = (it for it in containers if re.search(r"node-2(-\d+)?$", it))
        succeed("docker", "kill", lost)
        assert process.wait(timeout=WORK_S) == 0, printed()
        assert "tridock: node-3 takes the place of node-2\n" in printed()
        assert {
            "node-1: again: rank 0 of 2 on node-1: hello",
            "node-3: again: rank 1 of 2 on node-3: hello",
        } <= set(printed().splitlines())
    finally:
        process.kill()
        tridock(tmp_path, "down", "--hosts", "hostfile")
