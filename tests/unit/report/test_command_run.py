"""The report of a run of the user's own program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridock.cli import main

EXPERIMENT = "name: mine\nengine: command\ncommand: [torchrun, train.py]\nmetrics: key=value\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine-20260101-000000-abcd"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    ranks = [{"rank": rank, "node": "ab"[rank], "slot": 0} for rank in range(2)]
    (folder / "plan.json").write_text(json.dumps({"engine": "command", "world_size": 2, "ranks": ranks}))
    (folder / "exit_code").write_text("0\n")
    return folder


def report(*arguments: str) -> int:
    return main(["report", *arguments])


def test_losses_and_their_curve(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text("".join(f'{{"iteration": {n}, "loss": {3 - n}}}\n' for n in (1, 2)))
    assert report(str(run)) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "state finished nodes 2 ranks 2 command torchrun train.py trained 2 iterations" in text
    assert "first loss 2.0000 last loss 1.0000" in text
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_losses_the_table_says_how_it_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "exit_code").write_text("4\n")
    died = {"event": "rank_died", "rank": 1, "node": "b", "reason": "was ended by SIGKILL"}
    (run / "events.jsonl").write_text(json.dumps(died) + "\n")
    assert report(str(run)) == 0
    printed = capsys.readouterr()
    text = " ".join(printed.out.replace("│", " ").split())
    assert "state failed: rank 1 on b was ended by SIGKILL, exit code 4" in text
    assert "no losses: tridock run --metrics reads them" in printed.out + printed.err


def test_its_figures_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.5}\n{"iteration": 2, "loss": 2.0}\n')
    before = sorted(run.iterdir())
    assert report(str(run), str(run), "--json") == 0
    figures = {
        "folder": str(run), "run_id": run.name, "state": "finished", "nodes": 2, "ranks": 2,
        "command": ["torchrun", "train.py"], "iterations": 2, "first_loss": 2.5, "last_loss": 2.0, "valid_loss": None,
    }  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {"version": 1, "runs": [figures, figures]}
    assert sorted(run.iterdir()) == before
    assert report(str(run), "--json", "-o", str(run / "page.html"), "--log", str(run / "a.log")) == 2
    text = "--json: does not go with these options; got -o, --log; leave them out; it draws nothing\n"
    assert capsys.readouterr().err == text


def test_it_has_a_page(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.5}\n{"iteration": 2, "loss": 2.0}\n')
    assert report(str(run), "-o", str(run / "page.html")) == 0
    assert "torchrun train.py" in (run / "page.html").read_text()


def test_it_is_repeated_on_a_cluster_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(run)]) == 2
    assert "is a run of your own program, which needs a cluster; name the cluster: --hosts" in capsys.readouterr().err
