"""`tridock export`: what it says before a process starts, and the command line of that process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tridock.cli import main
from tridock.ops.runs import weights


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "-o", "out"]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: holds no experiment.yaml; give runs/<run-id>\n"


def test_torch_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment.yaml").touch()
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    assert main(["export", str(tmp_path), "-o", "out"]) == 3
    image = f"docker compose run --rm trainer tridock export {tmp_path} --output=out"
    todo = f"run it in the image: {image}, or pip install 'tridock[train]'"
    assert capsys.readouterr().err == f"torch: is not installed; {todo}\n"
    assert main(["generate", str(tmp_path), "--prompt", "it's"]) == 3
    assert f"trainer tridock generate {tmp_path} '--prompt=it'\"'\"'s'," in capsys.readouterr().err


def test_the_options_reach_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiment.yaml").touch()
    asked: list[list[str]] = []

    class Done:
        returncode = 4

    monkeypatch.setattr(weights.subprocess, "run", lambda argv, check: asked.append(argv) or Done())
    assert main(["export", str(tmp_path), "-o", "out", "--iteration", "7", "--dtype", "bfloat16"]) == 4
    program = [sys.executable, "-m", "tridock.train.huggingface.export"]
    assert asked == [[*program, str(tmp_path), "--output=out", "--iteration=7", "--dtype=bfloat16"]]
