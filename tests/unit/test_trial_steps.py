"""The steps of `make gpu-trial`, and its results: every run can start, the page lists them, tables and files."""

import tarfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.tools import tool
from tridock.errors import RequestError
from tridock.gpus import GPUS
from tridock.ops.runs.prepare import prepare
from tridock.plan import Assumptions
from tridock.triage import RULES

ROOT = Path(__file__).parents[2]
steps, results, trial = tool("trial_steps"), tool("trial_results"), tool("gpu_trial")
RUNS = [step for step in steps.STEPS.values() if isinstance(step.what, steps.Train)]


def measured(step: str, outcome: str = "passed", **more: object) -> Any:
    return results.Measurement(step, outcome, seconds=12.4, **more)


# ---- the steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [False, True], ids=["on a GPU", "rehearsed"])
@pytest.mark.parametrize("step", RUNS, ids=lambda step: step.name)
def test_every_run_of_the_trial_and_of_tests_gpu_can_start(step: Any, tiny: bool, tmp_path: Path) -> None:
    train = step.what
    argv = steps.argv_of(train, tmp_path / "id", "runs/a/checkpoints" if train.resumes else None, tiny=tiny)
    assert argv[1:4] == ["-m", "tridock.cli", "train"]
    assert ("--force" in argv) == train.force
    changes = [word for before, word in pairwise(argv) if before == "--set"]
    on = Assumptions(gpu=None if tiny else GPUS["h100-80gb"])
    prepared = prepare(Path(argv[4]), {"localhost": range(1)}, on, changes, force=train.force)
    assert (prepared.experiment.train.load == "runs/a/checkpoints") == bool(train.resumes)
    assert tiny or (prepared.assessment.verdict == "no-fit") == (train.fails_with == "cuda-out-of-memory")


def test_tests_gpu_runs_nothing_but_steps() -> None:
    for path in (ROOT / "tests/gpu").glob("test_*.py"):
        assert "from tests.gpu.conftest import steps" in path.read_text()
    assert {step.name for step in steps.ENGINES} | steps.MEMORY.keys() <= steps.STEPS.keys()


def test_steps_know_what_they_wait_for_and_fit_their_budget() -> None:
    names = list(steps.STEPS)
    assert len(names) == sum(len(row) for _, row in steps.ROWS)
    rules = {rule.name for rule in RULES} | {"device", ""}
    for place, step in enumerate(steps.STEPS.values()):
        assert step.expected_s < step.limit_s <= 360
        if isinstance(step.what, steps.Train):
            assert step.what.fails_with in rules
            assert step.what.resumes in {"", *names[:place]}
    first = sum(step.expected_s for _, row in steps.ROWS[:9] for step in row)
    assert first + trial._END_S <= 480


def test_the_page_lists_the_steps() -> None:
    page = (ROOT / "docs/gpus.md").read_text()
    for number, (title, row) in enumerate(steps.ROWS, 1):
        names = ", ".join(f"`{step.name}`" for step in row[:11])
        assert f"| {number} | {title} | {names}{', …' * (len(row) > 11)} |" in page, number


def test_steps_are_chosen_by_name_and_by_row_with_what_they_resume() -> None:
    def names(*words: str) -> list[str]:
        return [step.name for step in steps.chosen(words)]

    assert names() == list(steps.STEPS)
    assert names("out-of-memory", "1", "fsdp-resumed") == ["nvidia-smi", "fsdp", "fsdp-resumed", "out-of-memory"]


# ---- its results -----------------------------------------------------------------------------------


def test_a_table_has_the_columns_that_its_steps_have_figures_for() -> None:
    shown = results.tables(
        [
            measured("1.3b-ddp-eager", mfu=0.4567, peak_bytes=2**31, planned_bytes=2**30, tokens_per_second=12345.6),
            measured("no-gpu", "failed", reason="a | b\nc"),
            measured("ddp", first_loss=8.5, last_loss=8.25, step_s=0.0123),
        ],
        {"On": "NVIDIA H200", "torch": "2.13.0"},
    )
    assert shown == (
        "On NVIDIA H200, torch 2.13.0.\n\n**Every strategy starts**\n\n"
        "| step | result | loss | time of a step | took |\n|---|---|---|---|---|\n"
        "| ddp | passed | 8.5000 to 8.2500 | 12.3 ms | 12 s |\n\n"
        "**1.3B in bf16, 8,192 tokens a step**\n\n"
        "| step | result | tokens/s | MFU | peak memory | planned | error of the plan | took |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| 1.3b-ddp-eager | passed | 12,346 | 45.7% | 2.00 GiB | 1.00 GiB | -50.0% | 12 s |\n\n"
        "**Faults that Tridock must name**\n\n"
        "| step | result | took | reason |\n|---|---|---|---|\n"
        "| no-gpu | failed | 12 s | a \\| b<br>c |"
    )


def stored(folder: Path, *found: Any, rehearsal: bool = False) -> Path:
    machine = {"On": "NVIDIA H200"}
    results.store(folder, {"rehearsal": rehearsal, "machine": machine, "steps": [asdict(one) for one in found]})
    return folder


def test_the_results_of_several_trials_become_the_page(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(before := (ROOT / "docs/results.md").read_text())
    first = stored(tmp_path / "a", measured("ddp", "failed"), measured("fsdp"))
    results.publish([first, stored(tmp_path / "b", measured("ddp"), measured("fsdp", "not run"))], page)
    new = page.read_text()
    assert new.startswith(before[: before.index(results.BEGIN)])
    assert new.endswith(before[before.index(results.END) :])
    assert "On NVIDIA H200.\n" in new
    assert "| ddp | passed | 12 s |\n| fsdp | passed | 12 s |\n" in new


def test_a_rehearsal_does_not_become_the_page(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("")
    rehearsed, none = stored(tmp_path / "a", measured("ddp"), rehearsal=True), tmp_path / "b"
    for folder, got in ((rehearsed, "the results of a rehearsal on the CPU"), (none, "no results.json in it")):
        with pytest.raises(RequestError) as caught:
            results.publish([folder], page)
        assert str(caught.value) == f"{folder}: has no results of a GPU; got {got}; give the --out of a trial"
    assert page.read_text() == ""


def test_the_archive_keeps_to_its_size_and_leaves_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for name, text in (("checkpoints/w", "w"), ("logs/rank-0.log", "begin" + "x" * 1000), ("z.gz", "z" * 2000)):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    monkeypatch.setattr(results, "_LOG", 1000)
    monkeypatch.setattr(results, "_TRACE", 1999)
    results.archive(tmp_path / "steps.tar", "ddp", [run])
    results.archive(tmp_path / "steps.tar", "fsdp", [run])
    with tarfile.open(tmp_path / "steps.tar") as tar:
        assert tar.getnames() == ["ddp/logs/rank-0.log", "fsdp/logs/rank-0.log"]
        kept = tar.extractfile("ddp/logs/rank-0.log")
        assert kept is not None
        assert kept.read() == b"x" * 1000
    monkeypatch.setattr(results, "_MOST_BYTES", 2000)
    results.archive(tmp_path / "steps.tar", "late", [run])
    with tarfile.open(tmp_path / "steps.tar") as tar:
        assert len(tar.getnames()) == 2
