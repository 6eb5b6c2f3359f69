"""docs/guides/data.md, line by line: every command in an empty folder, every line of output that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT
from tests.patience import WORK_S

BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.full  # test_preprocess.py; tests/unit/test_docs_commands.py: its commands
def test_from_raw_text_to_a_first_training_step(tmp_path: Path) -> None:
    guide, _, on_hosts = (ROOT / "docs/guides/data.md").read_text(encoding="utf-8").partition("## 6. On your hosts")
    assert "fab launch" in on_hosts
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "tridock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tridock.cli "$@"\n')
    (tools / "tridock").chmod(0o755)
    folder = tmp_path / "empty"
    folder.mkdir()
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = ""
    blocks = BLOCK.findall(guide)
    assert [kind for kind, _ in blocks] == ["sh", "sh", "sh", "sh", "text", "sh", "sh"]
    for kind, content in blocks:
        if kind == "text":
            assert content.splitlines() == printed.splitlines()
            continue
        done = subprocess.run(
            ["bash", "-euc", content],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=WORK_S,
        )
        printed = done.stdout
        assert done.returncode == 0, printed
    assert "iteration" in printed
    assert len(list((folder / "runs").glob("python-*/metrics.jsonl"))) == 1
