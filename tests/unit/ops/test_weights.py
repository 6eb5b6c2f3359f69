"""`tridock export`: what it says before a process starts, and the command line of that process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tridock.cli import main
from tridock.extras import install_command
from tridock.ops.runs import weights


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "-o", "out"]) == 2
    hosts = f"for a run of a cluster: --hosts HOSTFILE {tmp_path.name}"
    assert capsys.readouterr().err == f"{tmp_path}: holds no experiment.yaml; give runs/<run-id>, or {hosts}\n"
    assert main(["generate", "runs/none", "--prompt", "a"]) == 2
    assert capsys.readouterr().err == (
        "runs/none: is not here; give runs/<run-id>, or a folder of transformers', "
        "or for a run of a cluster: --hosts HOSTFILE none\n"
    )


def test_torch_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment.yaml").touch()
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    assert main(["export", str(tmp_path), "-o", "out"]) == 3
    image = f"docker compose run --rm trainer tridock export {tmp_path} --output=out"
    todo = f"run it in the image: {image}, or {install_command('torch')}"
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


@pytest.mark.parametrize("named", ["--hosts hostfile runs/demo-1", "--hosts hostfile demo-1", "demo-1"])
def test_a_run_of_the_cluster_is_fetched_and_its_checkpoint_named(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostfile").write_text("host-a slots=1\n")
    (tmp_path / "runs/demo-1").mkdir(parents=True)
    (tmp_path / "runs/demo-1/experiment.yaml").touch()
    asked: list[object] = []

    def fetch_checkpoint(_: object, run: object, destination: Path, iteration: int | None) -> tuple[Path, int]:
        asked.append((run, iteration))
        return destination / str(run), 40

    monkeypatch.setattr("tridock.cli.options.Arguments.open_client", lambda _: None)
    monkeypatch.setattr("tridock.ops.runs.cluster_runs.choose_run", lambda _, name, *, active: name)
    monkeypatch.setattr("tridock.ops.runs.fetch.fetch_checkpoint", fetch_checkpoint)
    monkeypatch.setattr(weights, "run_program", lambda *given: asked.append(given) or 0)
    assert main(["export", *named.split(), "-o", "out"]) == 0
    assert main(["generate", *named.split(), "--prompt", "a", "--iteration", "40"]) == 0
    assert asked == [
        ("demo-1", None),
        (weights.EXPORT, ["runs/demo-1", "--output=out", "--iteration=40"]),
        ("demo-1", 40),
        (weights.GENERATE, ["runs/demo-1", "--prompt=a", "--iteration=40"]),
    ]
    # A folder here is read here.
    assert main(["export", "runs/demo-1", "-o", "out"]) == 0
    assert asked[4:] == [(weights.EXPORT, ["runs/demo-1", "--output=out"])]
