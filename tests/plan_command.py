"""Runs `tridock plan` in a test, from the repository's folder: its JSON, or its refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tridock.cli import main

JEAN_ZAY = Path("configs/jean-zay")
V100 = ("--gpu", "v100-16gb", "--gpus-per-node", "4")


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["version"] == 1
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err
