"""What counts as a rehearsed loss of a rank, and what is refused before anything starts."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import SMALL, with_fields
from tridock.cli import main
from tridock.errors import RunError
from tridock.ops.runs import rehearsal
from tridock.ops.runs.rehearsal import Lost, _attempts

ROOT = Path(__file__).parents[3]
FINE = {"exit_code": 0, "rank": 3, "after": 10, "restarted_from": 8, "repeated": {9: (1.5, 1.5), 10: (1.25, 1.25)}}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"exit_code": 4}, "ended with exit code 4"),
        ({"rank": None}, "ended, or was ended, before it had lost a rank"),
        ({"restarted_from": None}, "was not restarted after it had lost rank 3"),
        ({"repeated": {}}, "repeated no iteration after it had lost rank 3"),
        (
            {"repeated": {9: (1.5, 1.5), 10: (1.25, 1.2500000000000002)}},
            "has other losses after it had lost rank 3; got (1.25, 1.2500000000000002) at iteration 10",
        ),
    ],
)
def test_a_run_that_does_not_go_on_as_before_has_failed(fields: dict[str, Any], what: str) -> None:
    Lost(Path("runs/a"), **FINE).check(program=False)
    with pytest.raises(RunError) as caught:
        Lost(Path("runs/a"), **{**FINE, **fields}).check(program=False)
    assert str(caught.value) == f"a: {what}; see runs/a/events.jsonl and runs/a/logs"


def test_a_program_is_stopped_and_need_not_repeat_its_losses() -> None:
    Lost(Path("runs/a"), **{**FINE, "exit_code": 143, "repeated": {9: (1.0, 2.0)}}).check(program=True)
    with pytest.raises(RunError):
        Lost(Path("runs/a"), **{**FINE, "exit_code": 1}).check(program=True)


@pytest.mark.parametrize("code", [130, 85])
def test_an_interrupted_run_is_no_failure(code: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        Lost(Path("runs/a"), code).check(program=False)


def test_a_programs_losses_begin_again_where_an_iteration_follows_a_later_one() -> None:
    before, again = [(1, 3.0), (2, 2.0), (3, 1.0)], [(2, 2.0), (3, 1.0), (4, 0.5)]
    assert _attempts(before + again) == (before, again)
    assert _attempts(before) == (before, [])
    assert _attempts([]) == ([], [])


def refused(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and message of a rehearsal, which leaves nothing."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with redirect_stderr(io.StringIO()) as stderr, redirect_stdout(io.StringIO()):
        code = main(["rehearse", *arguments])
    assert sorted(folder.rglob("*")) == before
    return code, stderr.getvalue()


@pytest.fixture(autouse=True)
def on_the_accelerator_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # restored after what the command sets


def test_what_cannot_run_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ROOT / "configs/jean-zay/76b-as-written.yaml"
    assert refused(monkeypatch, tmp_path, str(config), "--nodes", "32", "--gpus-per-node", "4") == (
        2,
        f"{config}: parallel.pipeline_model_parallel_size: must divide num_layers 60; got 32;"
        " use 30 or 60, or num_layers 64\n",
    )


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ROOT / "configs/jean-zay/76b.yaml"
    arguments = (str(config), "--nodes", "30", "--gpus-per-node", "4", "--gpu", "8gib")
    code, text = refused(monkeypatch, tmp_path, *arguments)
    assert (code, text.split(";")[0]) == (
        2,
        f"{config}: a rank of stage 0 needs more memory than the 8.0 GiB of a 8gib",
    )


def test_images_that_are_not_here_have_no_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ROOT / "configs/resnet50.yaml"
    text = f"{config}: data.data_path: is not on this machine; got data/imagenet; copy them here, or make them: "
    assert refused(monkeypatch, tmp_path, str(config)) == (2, f"{text}docs/torch.md\n")


def test_a_machine_that_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsal, "_memory", lambda: 2 << 30)
    config = ROOT / "configs/jean-zay/30b.yaml"
    code, text = refused(monkeypatch, tmp_path, str(config))
    assert (code, text) == (
        3,
        "this machine: has too little memory for every parallel size above one; got 4 ranks, memory for 3;"
        " rehearse it on a larger machine\n",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus-per-node", "4"), "--gpus-per-node: is the number of slots of --nodes; got 4; give --nodes too"),
        (("--include", "a"), "--include: selects nodes of a hostfile; got a; give --hosts instead of --nodes"),
    ],
)
def test_options_without_effect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    code, text = refused(monkeypatch, tmp_path, str(ROOT / "configs/demo.yaml"), *options)
    assert (code, text) == (2, f"{message}, or leave it out\n")


def test_data_are_linked_with_the_tokenizer_beside_them(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "tokenizer").mkdir(parents=True)
    for name in ("x.bin", "x.idx", "x.json", "y.bin"):
        (data / name).write_text(name)
    experiment = with_fields(SMALL, {})
    assert rehearsal.has_data(experiment, tmp_path)
    linked = rehearsal.with_linked_data(experiment, tmp_path, tmp_path / "links")
    assert sorted(path.name for path in (tmp_path / "links").iterdir()) == ["tokenizer", "x.bin", "x.idx", "x.json"]
    assert Path(f"{linked.data.data_path}.idx").read_text() == "x.idx"
    (data / "x.idx").unlink()
    assert not rehearsal.has_data(experiment, tmp_path)


def test_a_blend_is_linked_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for suffix in ("bin", "idx"):
            (tmp_path / name / f"x.{suffix}").write_text(name)
    experiment = with_fields(SMALL, {"data.data_path": (0.7, "a/x", 0.3, "b/x")})
    linked = rehearsal.with_linked_data(experiment, tmp_path, tmp_path / "links").data
    assert [(it.weight, Path(f"{it.prefix}.idx").read_text()) for it in linked.sets(0)] == [(0.7, "a"), (0.3, "b")]
    demo = rehearsal.with_data(with_fields(SMALL, {"data.data_path": None, "data.train_data_path": "a/x"}), "d")
    assert demo.data.prefixes == ("d",)
