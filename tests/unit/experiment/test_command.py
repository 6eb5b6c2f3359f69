"""The user's own program as an experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.experiment import load_command, load_experiment
from tridock.experiment.command import name_of


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torchrun --nproc-per-node 2 src/Train_GPT.py --x a.py", "train-gpt"),
        ("mpirun ./a.out", "mpirun"),
        ("/usr/bin/true", "true"),
        ("??", "run"),
    ],
)
def test_a_run_is_named_after_its_script(line: str, name: str) -> None:
    assert name_of(tuple(line.split())) == name


def test_a_file_has_its_problems_named_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: Big\nengine: command\ncommand: []\nmodel: {}\nrestart: {node_timeout: 5s}\n")
    with pytest.raises(RequestError) as refusal:
        load_command(path)
    lines = str(refusal.value).splitlines()
    assert {line.removeprefix(f"{path}: ").partition(": ")[0] for line in lines} == {
        "name", "command", "model", "restart.node_timeout"
    }  # fmt: skip


def test_what_needs_a_model_says_how_to_start_a_program(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    path.write_text("name: a\nengine: command\ncommand: [torchrun, train.py]\n")
    assert load_command(path).command == ("torchrun", "train.py")
    with pytest.raises(RequestError) as refusal:
        load_experiment(path)
    assert str(refusal.value) == (
        f"{path}: engine: is your own program, without a model; got command; start it with tridock run --config"
        f" '{path}'; tridock logs has the output of its runs"
    )
