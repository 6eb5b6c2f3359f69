"""`tridock reproduce` on real ranks: the same losses to the last bit, and another seed is noticed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, make_data, make_run
from tests.patience import STEP_S

pytestmark = pytest.mark.distributed


def tridock(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "tridock.cli", *arguments]
    return subprocess.run(argv, cwd=workspace, env=env, capture_output=True, text=True, timeout=STEP_S, check=False)


def test_a_run_is_done_once_more_from_its_folder(tmp_path: Path) -> None:
    make_data(tmp_path)
    fields = {
        "model.hidden_dropout": 0.1,
        "train.eval_interval": 4,
        "parallel.strategy": "zero",
        "parallel.zero_stage": 1,
    }
    config = make_run(tmp_path, "template", 1, **fields) / "experiment.yaml"
    done = tridock(tmp_path, "train", str(config), "--nproc", "1", "--run-id-file", "id")
    assert done.returncode == 0, done.stderr
    first = tmp_path / "runs" / (tmp_path / "id").read_text().strip()

    done = tridock(tmp_path, "reproduce", f"runs/{first.name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"verdict +│ identical", done.stdout)
    again = tmp_path / "runs" / re.findall(r"in the folder of (\S+)", done.stdout)[0]
    found = json.loads((again / "reproduction.json").read_text())
    # 8 iterations, two validations and a test.
    assert (found["verdict"], found["tolerance"], found["losses"]["compared"]) == ("identical", 0.0, 11)
    assert (found["then"], found["now"], found["environment"]) == (first.name, again.name, [])
    assert json.loads((again / "manifest.json").read_text())["data_sha256"]["data/small.idx"]

    # Another seed gives other losses: here the folder names another.
    text = (first / "experiment.yaml").read_text()
    (first / "experiment.yaml").write_text(re.sub(r"(?m)^  seed: \d+$", "  seed: 77", text))
    done = tridock(tmp_path, "reproduce", f"runs/{first.name}")
    assert done.returncode == 4, done.stdout + done.stderr
    assert re.search(r"verdict +│ different", done.stdout)
    assert re.search(r"seed +│ 1234 +│ 77", done.stdout)
