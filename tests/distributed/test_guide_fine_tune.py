"""docs/guides/fine-tune.md, where peft and lm-eval are installed: the merged model has the adapter's scores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT
from tests.documentation import blocks
from tests.patience import WORK_S

MISSING = [name for name in ("peft", "lm_eval", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)}"),
]
PROGRAMS = {"tridock": "-m tridock.cli", "torchrun": "-m torch.distributed.run", "lm_eval": "-m lm_eval", "python3": ""}


def accuracy(scores: Path) -> float:
    (written,) = scores.rglob("results_*.json")
    found: float = json.loads(written.read_text())["results"]["capitals"]["acc,none"]
    return found


def test_an_adapter_and_its_scores(tmp_path: Path) -> None:
    tools, folder = tmp_path / "bin", tmp_path / "empty"
    tools.mkdir()
    folder.mkdir()
    for name, options in PROGRAMS.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = ""
    for block in blocks("docs/guides/fine-tune.md"):
        if block.language != "sh" or block.text.startswith("pip install") or "--hosts" in block.text:
            continue
        done = subprocess.run(
            ["bash", "-euc", block.text],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=WORK_S,
        )
        assert done.returncode == 0, f"{block}: {done.stdout}"
        printed += done.stdout
    assert "The capital of Italy is" in printed
    state = json.loads((folder / "adapter/checkpoint-60/trainer_state.json").read_text())
    losses = [line["loss"] for line in state["log_history"] if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    base, adapter, merged = (accuracy(folder / "scores" / name) for name in ("base", "adapter", "merged"))
    assert adapter == merged >= base
