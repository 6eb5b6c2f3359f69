"""`make gpu-trial`: what its blocks run, its measurements and tables, and machines on which it cannot run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.test_reference import tool
from tridock.experiment import load_experiment
from tridock.plan import Assumptions, assess
from tridock.triage import RULES

ROOT = Path(__file__).parents[2]
blocks, trial = tool("trial_blocks"), tool("gpu_trial")
STEPS = [(number, step) for number, (_, _, steps) in blocks.BLOCKS.items() for step in steps]
RUNS = [pytest.param(step.what, id=f"{number}-{step.name}") for number, step in STEPS if hasattr(step.what, "config")]


def measured(block: int, step: str, outcome: str = "passed", **more: object) -> object:
    return trial.Measurement(block, step, outcome, 12.4, **more)


@pytest.mark.parametrize("train", RUNS)
@pytest.mark.parametrize("tiny", [False, True])
def test_every_run_of_a_block_is_a_legal_experiment(train, tiny: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    argv = blocks.argv_of(train, tmp_path / "id", "runs/a/checkpoints" if train.resumes else None, tiny=tiny)
    assert argv[1:4] == ["-m", "tridock.cli", "train"]
    changes = [word for before, word in pairwise(argv) if before == "--set"]
    experiment = load_experiment(Path(argv[4]), changes)
    assert (experiment.train.load == "runs/a/checkpoints") == bool(train.resumes)
    assert assess(experiment, {"localhost": range(1)}, argv[4], Assumptions()).checked().world_size == 1


def test_a_block_ends_within_ten_minutes_and_knows_what_it_waits_for() -> None:
    assert max(limit for _, limit, _ in blocks.BLOCKS.values()) + trial._STOP_S < 590
    rules = {rule.name for rule in RULES} | {"device"}
    for number, (_, _, steps) in blocks.BLOCKS.items():
        names = [step.name for step in steps]
        assert len(names) == len(set(names)), number
        for place, step in enumerate(steps):
            if isinstance(step.what, blocks.Train):
                assert step.what.fails_with in rules | {""}
                assert step.what.resumes in {"", *names[:place]}
            elif step.what.startswith("tests/"):
                assert (ROOT / step.what).is_file()


# ---- measurements and tables -----------------------------------------------------------------------


def test_a_table_has_the_columns_that_its_block_has_figures_for() -> None:
    shown = trial.tables(
        [
            measured(1, "ddp", first_loss=8.5, last_loss=8.25, step_s=0.0123),
            measured(1, "no visible GPU", "failed", detail="a | b"),
            measured(3, "ddp", mfu=0.4567, peak_bytes=2**31, planned_bytes=2**30, tokens_per_second=12345.6),
        ],
        {"On": "NVIDIA H200", "torch": "2.13.0"},
    )
    assert shown == (
        "On NVIDIA H200, torch 2.13.0.\n\n**Block 1: Every strategy starts** (`make gpu-trial BLOCK=1`)\n\n"
        "| step | result | loss | time of a step | took | message |\n|---|---|---|---|---|---|\n"
        "| ddp | passed | 8.5000 to 8.2500 | 12.3 ms | 12 s |  |\n"
        "| no visible GPU | failed |  |  | 12 s | a \\| b |\n\n"
        "**Block 3: 1.3B on one GPU** (`make gpu-trial BLOCK=3`)\n\n"
        "| step | result | tokens/s | MFU | peak memory | planned | error of the plan | took |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| ddp | passed | 12,346 | 45.7% | 2.00 GiB | 1.00 GiB | -50.0% | 12 s |"
    )


def test_the_page_has_a_place_for_them() -> None:
    page = (ROOT / "docs/results.md").read_text()
    new = trial.with_tables(page, [measured(1, "ddp")], {"On": "NVIDIA H200"})
    assert new.startswith(page[: page.index(trial.BEGIN)])
    assert new.endswith(page[page.index(trial.END) :])
    assert "| ddp | passed | 12 s |" in new


def test_each_test_is_a_measurement_with_the_figures_that_it_recorded() -> None:
    found = trial.measurements_of(
        4,
        """<testsuites><testsuite>
        <testcase name="test_the_plan[ddp-125m]" time="3.5"><properties><property name="planned_bytes" value="90"/>
        <property name="peak_bytes" value="100"/></properties><failure message="assert 90 == 100">…</failure></testcase>
        <testcase name="test_b" time="0.1"><skipped message="needs the source"/></testcase>
        </testsuite></testsuites>""",
    )
    assert list(found) == [
        trial.Measurement(4, "the_plan[ddp-125m]", "failed", 3.5, "assert 90 == 100", peak_bytes=100, planned_bytes=90),
        trial.Measurement(4, "b", "skipped", 0.1, "needs the source"),
    ]


# ---- running ---------------------------------------------------------------------------------------

RUN = """
import json, pathlib, sys
run = pathlib.Path("runs/demo-20260101-000000-0001")
run.mkdir(parents=True, exist_ok=True)
run.joinpath("experiment.yaml").write_text(pathlib.Path(sys.argv[1]).read_text())
lines = [{"iteration": n, "loss": 9.0 - n, "step_time_s": n / 10, "tokens_per_second": 100.0} for n in (1, 2, 3)]
run.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
events = [{"event": "checkpoint_saved", "pause_seconds": pause} for pause in (0.25, 0.5)]
events.append({"event": "run_finished", "device": "NVIDIA H200", "peak_memory_bytes": 5})
run.joinpath("events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
run.joinpath("plan.json").write_text(json.dumps({"memory": {"stages": [{"terms": [
    {"name": "weights", "bytes": 4}, {"name": "NCCL", "bytes": 9}, {"name": "fragmentation", "bytes": 2}]}]}}))
pathlib.Path(sys.argv[2]).write_text(run.name)
print("the end")
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `tridock train` is a program that ends at once with the code of the file `code`."""
    monkeypatch.chdir(tmp_path)

    def argv_of(step, noted: Path, *_: object, **__: object) -> list[str]:  # type: ignore[no-untyped-def]
        code = (tmp_path / "code").read_text() if (tmp_path / "code").exists() else "0"
        return [sys.executable, "-c", RUN, str(ROOT / step.config), str(noted), code]

    monkeypatch.setattr(trial, "argv_of", argv_of)
    return tmp_path


def one_step(workspace: Path, step: object, seconds: float = 60.0, *, rehearsal: bool = False) -> object:
    of = trial.Trial(workspace, rehearsal, 1, time.monotonic() + seconds)
    (found,) = of.measure([step])
    return found


def test_a_run_becomes_a_measurement(workspace: Path) -> None:
    found = one_step(workspace, blocks.Step("ddp", blocks.Train("configs/demo.yaml")))
    assert (found.outcome, found.run, found.device) == ("passed", "demo-20260101-000000-0001", "NVIDIA H200")
    assert (found.first_loss, found.last_loss, found.step_s, found.tokens_per_second) == (8.0, 6.0, 0.25, 100.0)
    assert (found.peak_bytes, found.planned_bytes, found.pause_s) == (5, 4, 0.25)
    assert found.seconds > 0


def test_a_run_with_another_exit_code_has_failed(workspace: Path) -> None:
    (workspace / "code").write_text("4")
    found = one_step(workspace, blocks.Step("ddp", blocks.Train("configs/demo.yaml")))
    assert (found.outcome, found.detail) == ("failed", "exit code 4, 0 expected: the end")


def test_a_step_whose_records_cannot_be_read_leaves_the_others_theirs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter([ValueError("no figures"), measured(1, "fsdp")])

    def read(*_: object) -> object:
        found = next(figures)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(trial, "figures", read)
    steps = [blocks.Step(name, blocks.Train("configs/demo.yaml")) for name in ("ddp", "fsdp")]
    first, second = trial.Trial(workspace, False, 1, time.monotonic() + 60.0).measure(steps)
    assert (first.step, first.outcome, first.detail) == ("ddp", "failed", "ValueError('no figures')")
    assert (second.step, second.outcome) == ("fsdp", "passed")


def test_ctrl_c_keeps_the_steps_before(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(trial, "prepare_demo", lambda *_, **__: None)

    def measure(*_: object) -> Iterator[object]:
        yield measured(1, "ddp")
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.Trial, "measure", measure)
    assert trial.main(["--folder", str(workspace)]) == 130
    assert capsys.readouterr().err == f"gpu-trial: interrupted; the steps before are in {workspace}/results.json\n"
    assert [one.step for one in trial.load(workspace)] == ["ddp"]


def test_a_step_after_the_blocks_time_has_failed_and_one_that_needs_a_gpu_is_not_rehearsed(workspace: Path) -> None:
    late = one_step(workspace, blocks.Step("ddp", blocks.Train("configs/demo.yaml")), seconds=0.0)
    assert (late.outcome, late.detail) == ("failed", "the block's time was over")
    gpu = one_step(workspace, blocks.Step("nvidia-smi", "nvidia-smi", needs_gpu=True), rehearsal=True)
    assert (gpu.outcome, gpu.detail) == ("skipped", "needs a GPU")


def test_a_rehearsal_records_its_block_beside_the_others_and_leaves_the_page(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(trial, "prepare_demo", lambda *_, **__: None)
    steps = (blocks.Step("ddp", blocks.Train("configs/demo.yaml")), blocks.Step("smi", "nvidia-smi", needs_gpu=True))
    monkeypatch.setitem(trial.BLOCKS, 3, ("Speed", 60, steps))
    trial.store(workspace, [measured(1, "kept"), measured(3, "replaced")], {})
    page = workspace / "page.md"
    assert trial.main(["--block", "3", "--folder", str(workspace), "--page", str(page)]) == 0
    document = json.loads((workspace / "results.json").read_text())
    assert [(one["block"], one["step"]) for one in document["measurements"]] == [(1, "kept"), (3, "ddp"), (3, "smi")]
    assert document["machine"]["On"] == "NVIDIA H200"
    assert not page.exists()
    assert capsys.readouterr().out.startswith("block 3: Speed, at most 1 min\n  passed   ddp, ")


# ---- machines on which it cannot run ---------------------------------------------------------------


def nvidia_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize("script", [None, "echo 'No devices were found'; exit 6"])
def test_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if script:
        nvidia_smi(tmp_path, script)
    got = "No devices were found" if script else "no nvidia-smi"
    todo = "run it on a machine with GPUs, or rehearse it on the CPU: DS_ACCELERATOR=cpu make gpu-trial"
    assert trial.main(["--folder", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"gpu-trial: this machine has no GPU; got {got}; {todo}\n"


def test_a_torch_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    nvidia_smi(tmp_path, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'")
    error = "AssertionError: Torch not compiled with CUDA enabled"
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    todo = "install torch's CUDA build (make venv FLAVOR=gpu), or see what nvidia-smi and tridock check say"
    assert trial.main(["--folder", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"gpu-trial: torch has no GPU here; got {error}; {todo}\n"


@pytest.mark.parametrize("lists_gpus", [True, False])
def test_a_test_of_gpus_is_skipped_only_where_nvidia_smi_lists_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists_gpus: bool
) -> None:
    """Here torch has no GPU."""
    nvidia_smi(tmp_path, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-aa)'" if lists_gpus else "exit 6")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    argv = [sys.executable, "-m", "pytest", "--confcutdir", "tests/gpu", "tests/gpu/test_memory.py", "-p"]
    argv += ["no:cacheprovider", "-rA", "-x"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if lists_gpus else 0), done.stdout
    assert ("torch has no GPU for local rank 0" in done.stdout) is lists_gpus
    assert (" skipped" in done.stdout) is not lists_gpus


def test_a_resumed_run_continues_from_its_checkpoint_wherever_the_signal_came(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    def argv_of(step, noted: Path, checkpoint: str | None, **_: object) -> list[str]:  # type: ignore[no-untyped-def]
        given.append((checkpoint or "", *step.changes))
        return [sys.executable, "-c", RUN, str(ROOT / step.config), str(noted), "0"]

    monkeypatch.setattr(trial, "argv_of", argv_of)
    of = trial.Trial(workspace, False, 5, time.monotonic() + 60)
    first = blocks.Step("saved", blocks.Train("configs/demo.yaml"))
    again = blocks.Step("resumed", blocks.Train("configs/demo.yaml", resumes="saved", further=20))
    assert [one.outcome for one in of.measure([first])] == ["passed"]
    folder = "runs/demo-20260101-000000-0001/checkpoints"
    (missing,) = of.measure([again])
    assert (missing.outcome, missing.detail) == ("failed", f"{folder} contains no complete checkpoint")
    for number in (50, 173):
        (workspace / folder / f"iter_{number:07d}").mkdir(parents=True)
        (workspace / folder / f"iter_{number:07d}" / "files.json").touch()
    assert [one.outcome for one in of.measure([again])] == ["passed"]
    assert given[-1] == (folder, "train.train_iters=193")


def test_what_a_test_starts_keeps_the_packages_that_were_carried_here(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/carried")
    seen: list[str] = []
    monkeypatch.setattr(trial.Trial, "_execute", lambda _, argv, env: (seen.append(env["PYTHONPATH"]), (1, ""))[1])
    one_step(workspace, blocks.Step("two", blocks.COLLIDE))
    assert seen == [f"{ROOT}:/carried"]
