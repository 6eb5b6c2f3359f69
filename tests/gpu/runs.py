"""Runs on one GPU, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LIMIT_S = 500.0
_STOP_S = 50.0
"""Until a run that is interrupted has ended on all ranks."""


def train(workspace: Path, config: str, *changes: str, **env: str) -> Path:
    noted = workspace / "run-id"
    argv = [sys.executable, "-m", "tridock.cli", "train", str(ROOT / "configs" / config), "--nproc", "1"]
    argv += ["--workspace", str(workspace), "--run-id-file", str(noted)]
    argv += [word for change in changes for word in ("--set", change)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": path, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
        except BaseException:  # also Ctrl-C, at the end of a block's time: a run that is left behind holds the GPU
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=_STOP_S)
            raise
    assert process.returncode == 0, output[-5000:]
    return workspace / "runs" / noted.read_text().strip()
