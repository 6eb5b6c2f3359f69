"""Runs on one GPU, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def train(workspace: Path, config: str, *changes: str, **env: str) -> Path:
    noted = workspace / "run-id"
    argv = [sys.executable, "-m", "tridock.cli", "train", str(ROOT / "configs" / config), "--nproc", "1"]
    argv += ["--workspace", str(workspace), "--run-id-file", str(noted)]
    argv += [word for change in changes for word in ("--set", change)]
    keep = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(argv, env=keep, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return workspace / "runs" / noted.read_text().strip()
