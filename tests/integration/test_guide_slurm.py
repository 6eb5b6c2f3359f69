"""docs/guides/slurm.md on a real Slurm, line by line: every command, and every line of output that it shows."""

from __future__ import annotations

import re

import pytest

from tests.integration.slurm_cluster import SHARED, SlurmCluster
from tests.integration.support import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOLDER = f"{SHARED}/guide"


def pattern(line: str) -> str:
    """What a shown line stands for: `…` is anything."""
    return ".*".join(re.escape(part) for part in line.split("…"))


@pytest.mark.full  # test_slurm.py has its steps but sweeps and allocations; tests/unit/test_docs_commands.py reads it
def test_from_an_experiment_to_a_job_that_continues_by_itself(slurm_cluster: SlurmCluster) -> None:
    guide, _, site = (ROOT / "docs/guides/slurm.md").read_text(encoding="utf-8").partition("## On your site")
    assert "configs/slurm/jean-zay.yaml" in site
    slurm_cluster.succeed(f"mkdir {FOLDER} && cp -r /opt/tridock/configs {FOLDER}")
    blocks = BLOCK.findall(guide)
    assert [kind for kind, _ in blocks] == ["sh"] * 3 + ["text", "sh", "text", "sh", "sh", "text"] + ["sh"] * 4
    printed: list[str] = []
    for kind, content in blocks:
        if kind == "text":
            missing = [
                line for line in content.splitlines() if not any(re.fullmatch(pattern(line), p) for p in printed)
            ]
            assert missing == [], printed
            continue
        done = slurm_cluster.execute(f"set -euo pipefail\n{content}", folder=FOLDER)
        assert done.returncode == 0, f"{content}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        printed = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    states = [line.split("│")[3].strip() for line in printed if line.startswith("│ demo-")]
    assert states == ["done", "done", "stopped", "done", "done"]


def test_the_commands_for_a_site_render() -> None:
    from tridock.cli import main

    site = (ROOT / "docs/guides/slurm.md").read_text(encoding="utf-8").partition("## On your site")[2]
    (commands,) = (content for kind, content in BLOCK.findall(site) if kind == "text")
    assert len(commands.splitlines()) == 5
    for line in commands.splitlines():
        program, verb, submit, config, *arguments = line.split()
        assert (program, verb, submit) == ("tridock", "slurm", "submit")
        arguments = [str(ROOT / word) if word.startswith("configs/") else word for word in arguments]
        assert main(["slurm", "render", str(ROOT / config), *arguments]) == 0
