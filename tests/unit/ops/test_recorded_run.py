"""What a run's folder would execute or set is shown, and happens only if the user allows it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reproduction.test_reproduce import BASE, a_run
from tridock.cli import main
from tridock.errors import RequestError
from tridock.experiment import load_experiment, recorded_experiment
from tridock.ops.runs.recorded_run import confirm_run

PROGRAM = {"name": "mine", "engine": "command", "command": ["torchrun", "train.py", "a b"], "code": "mine"}


def effects(tmp_path: Path, fields: dict[str, Any], **given: Any) -> list[str]:
    (tmp_path / "experiment.yaml").write_text(json.dumps(fields))
    asked: list[str] = []

    def confirm(run: Path, found: Sequence[str]) -> None:
        assert run == tmp_path
        asked.extend(found)

    confirm_run(tmp_path, confirm, **given)
    return asked


def test_an_ordinary_experiment_needs_no_question(tmp_path: Path) -> None:
    train = {**BASE["train"], "load": "runs/a/checkpoints", "sample_prompts": ["def "], "seed": 7}
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "0"}
    fields = {"train": train, "restart": {"max": 2, "window": "1h"}, "deepspeed": {"zero_optimization": {}}, "env": env}
    assert effects(tmp_path, BASE | fields) == []


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"env": {"CUDA_INJECTION64_PATH": "runs/x/a.so"}}, "set env.CUDA_INJECTION64_PATH: runs/x/a.so"),
        ({"env": {"DS_ACCELERATOR": "cuda"}}, "set env.DS_ACCELERATOR: cuda"),
        ({"notify": [{"file": "~/.netrc"}]}, 'set notify: [{"file": "~/.netrc"}]'),
        ({"megatron_args": ["--tensorboard-dir=/home"]}, 'set megatron_args: ["--tensorboard-dir=/home"]'),
        ({"train": BASE["train"] | {"checkpoint_folder": "/home/ada"}}, "set train.checkpoint_folder: /home/ada"),
        ({"deepspeed": {"wandb": {"team": "theirs"}}}, "set deepspeed.wandb.team: theirs"),
        (
            {"trackers": [{"name": "mlflow", "address": "http://192.0.2.1", "file": "~/.ssh/id_ed25519"}]},
            'set trackers: [{"address": "http://192.0.2.1", "file": "~/.ssh/id_ed25519", "name": "mlflow"}]',
        ),
    ],
)
def test_what_sets_or_writes_or_sends_is_shown(tmp_path: Path, fields: dict[str, Any], shown: str) -> None:
    assert effects(tmp_path, BASE | fields) == [shown]


def test_a_program_is_shown_whole(tmp_path: Path) -> None:
    fields = {"resume_command": ["bash", "again.sh"], "setup": "pip install x", "env": {"A": "b"}}
    request = {"nodes": 2, "setup": ["module load cuda"], "env": {"B": "c"}}
    assert effects(tmp_path, PROGRAM | fields, request=request, more=["send 2 files"]) == [
        "run torchrun train.py 'a b'",
        'set resume_command: ["bash", "again.sh"]',
        "set setup: pip install x",
        "set env.A: b",
        'set slurm.setup: ["module load cuda"]',
        "set slurm.env.B: c",
        "send 2 files",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "GCONV_PATH", "DYLD_INSERT_LIBRARIES"),
        *("PYTHONPATH", "PYTHONSTARTUP", "PYTHONPYCACHEPREFIX", "PERL5LIB", "NODE_OPTIONS", "JAVA_TOOL_OPTIONS"),
        *("BASH_ENV", "ENV", "PATH", "SHELLOPTS", "PS4", "GIT_SSH_COMMAND", "TRIDOCK_TRACKERS_PYTHON", "HOME"),
    ],
)
@pytest.mark.parametrize("fields", [BASE, PROGRAM])
def test_variables_of_loaders_are_refused(tmp_path: Path, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        effects(tmp_path, fields | {"env": {name: "../runs/x"}})
    todo = f"if it is yours, start it as an experiment of your own: --config {tmp_path}/experiment.yaml"
    assert str(caught.value) == f"{tmp_path}: env.{name}: would change which code runs; got ../runs/x; {todo}"
    with pytest.raises(RequestError, match=rf"slurm\.env\.{name}: would change"):
        effects(tmp_path, fields, request={"env": {name: "../runs/x"}})


@pytest.mark.parametrize("folders", ["deps", "deps:.", "a/b:"])
def test_folders_of_a_programs_code_are_confirmed(tmp_path: Path, folders: str) -> None:
    shown = effects(tmp_path, PROGRAM | {"env": {"PYTHONPATH": folders}})
    assert f"set env.PYTHONPATH: {folders}" in shown


def test_a_runs_experiment_names_no_file_of_yours(tmp_path: Path) -> None:
    """Its content would go to the nodes in the next run's folder."""
    (tmp_path / "config.json").write_text('{"auths": {"registry": {"auth": "c2VjcmV0"}}}')
    (tmp_path / "experiment.yaml").write_text(json.dumps(BASE | {"deepspeed": str(tmp_path / "config.json")}))
    assert load_experiment(tmp_path / "experiment.yaml").deepspeed["auths"]
    with pytest.raises(RequestError, match=r"deepspeed: must be a mapping"):
        recorded_experiment(tmp_path)
    with pytest.raises(RequestError, match=r"deepspeed: must be a mapping"):
        confirm_run(tmp_path, lambda *_: None)


@pytest.mark.parametrize(("typed", "allowed"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_terminal_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, allowed: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run = a_run(tmp_path / "runs" / "t-1", [7.0], env={"NCCL_SOCKET_IFNAME": "eth0\x1b[2K"})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert main(["reproduce", str(run), "--workspace", str(tmp_path / "none")]) == 2
    shown = f"{run} would:\n  set env.NCCL_SOCKET_IFNAME: eth0\\x1b[2K\nallow it? [y/N] "
    after = "--workspace: is not a folder" if allowed else f"{run}: is not allowed to do that; read the lines above"
    assert capsys.readouterr().err.startswith(shown + after)


def test_more_ranks_than_processors_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "runs" / "t-1", [7.0])
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert main(["reproduce", str(run), "--workspace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{run} would:\n  start 2 ranks on this machine\n{run}: is not allowed")


def test_without_a_terminal_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "runs" / "t-1", [7.0], env={"LD_PRELOAD": f"{tmp_path}/logs/x.so"})
    for options in ((), ("--yes",)):
        assert main(["reproduce", str(run), "--workspace", str(tmp_path), *options]) == 2
        assert "env.LD_PRELOAD: would change which code runs" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["t-1"]
