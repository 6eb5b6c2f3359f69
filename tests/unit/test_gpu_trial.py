"""`make gpu-trial`: how each step ends and what is said of it, and machines on which it cannot run."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STEP_S, WORK_S
from tests.tools import tool
from tests.unit.node.test_accelerators import FAULTY, H100, NVLINKS, TABLES, report
from tests.unit.test_trial_steps import measured, stored

ROOT = Path(__file__).parents[2]
steps, results, trial = tool("trial_steps"), tool("trial_results"), tool("gpu_trial")
RUN_ID = "demo-20260101-000000-0001"


def test_every_word_that_is_no_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert trial.main(["--steps", "ddp", "dpd", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("; give numbers from 1 to 11, or some of nvidia-smi, ddp, fsdp,")[0] for line in lines] == [
        "--steps: is not a step; got dpd",
        "--steps: is not a step; got 0",
    ]


def test_it_needs_no_package_that_a_bare_machine_lacks(tmp_path: Path) -> None:
    missing = ("argcomplete", "cryptography", "fabric", "gigatoken", "invoke", "paramiko", "simdjson")
    code = f"""import pathlib, sys; sys.modules.update(dict.fromkeys({missing})); import gpu_trial
gpu_trial.prepare_demo(pathlib.Path("demo"), report=print)"""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=tmp_path)


# ---- running ---------------------------------------------------------------------------------------

RUN = f"""
import json, pathlib, sys
config, noted, code = sys.argv[1:]
run = pathlib.Path("runs/{RUN_ID}")
run.mkdir(parents=True, exist_ok=True)
run.joinpath("experiment.yaml").write_text(pathlib.Path(config).read_text())
lines = [{{"iteration": n, "loss": 9.0 - n, "step_time_s": n / 10, "tokens_per_second": 100.0}} for n in (1, 2, 3)]
run.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
events = [{{"event": "checkpoint_saved", "pause_seconds": pause}} for pause in (0.25, 0.5)]
if code == "0":
    events.append({{"event": "run_finished", "device": "NVIDIA H200", "peak_memory_bytes": 5}})
else:
    reason = "OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')"
    events.append({{"event": "run_failed", "rank": 0, "node": "localhost", "time": "t", "reason": reason}})
run.joinpath("events.jsonl").write_text("".join(json.dumps(event) + "\\n" for event in events))
run.joinpath("plan.json").write_text(json.dumps({{"memory": {{"stages": [{{"stage": 0, "total_bytes": 15, "terms": [
    {{"name": "weights", "bytes": 4}}, {{"name": "NCCL", "bytes": 9}}, {{"name": "fragmentation", "bytes": 2}}]}}]}}}}))
run.joinpath("exit_code").write_text(code)
pathlib.Path(noted).write_text(run.name)
print("look at the log")
sys.exit(int(code))
"""
HANGS = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("left").write_text(str(os.getpid()))
        time.sleep(9999)
time.sleep(9999)
"""
DEMO = "configs/demo.yaml"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `tridock train` is a program that ends at once with the code of the file `code`, or hangs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "prepare_demo", lambda *_, **__: None)

    def argv_of(train: Any, noted: Path, *_: object, **__: object) -> list[str]:
        code = (tmp_path / "code").read_text() if (tmp_path / "code").exists() else "0"
        program = HANGS if train.config == "hangs" else "import sys; sys.exit('a: b\\nc: d')" if code == "no" else RUN
        return [sys.executable, "-c", program, str(ROOT / train.config), str(noted), code]

    monkeypatch.setattr(trial, "argv_of", argv_of)
    return tmp_path


def a_step(config: str = DEMO, name: str = "ddp", limit_s: float = STEP_S, **train: object) -> Any:
    return steps.Step(name, steps.Train(config, **train), 1, limit_s)


def one_step(workspace: Path, step: Any, seconds: float = WORK_S, *, rehearsal: bool = False) -> Any:
    return trial.Trial(time.monotonic() + seconds, rehearsal, workspace / "work").measure(step)


@pytest.fixture(autouse=True)
def work(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()


def test_a_run_becomes_a_measurement(workspace: Path) -> None:
    found = one_step(workspace, a_step())
    assert (found.outcome, found.run, found.device) == ("passed", RUN_ID, "NVIDIA H200")
    assert (found.first_loss, found.last_loss, found.step_s, found.tokens_per_second) == (8.0, 6.0, 0.25, 100.0)
    assert (found.peak_bytes, found.planned_bytes, found.pause_s) == (5, 4, 0.25)
    assert found.seconds > 0


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ({"falls": 2.5}, "the loss did not fall by 2.5"),
        ({"within": 0.05}, "the planned memory is not within 5% of what was allocated"),
        ({"falls": 2.0, "within": 0.2}, ""),
    ],
)
def test_a_run_must_do_what_its_step_is_for(workspace: Path, train: dict[str, object], reason: str) -> None:
    found = one_step(workspace, a_step(**train))
    assert (found.outcome, found.reason) == ("failed" if reason else "passed", reason)


def test_the_reason_of_a_failure_is_triages(workspace: Path) -> None:
    (workspace / "code").write_text("4")
    said = "OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')"
    found = one_step(workspace, a_step())
    assert (found.outcome, found.reason) == ("failed", f"the GPU ran out of memory\n{said} (exit code 4)")


@pytest.mark.parametrize(("rule", "outcome"), [("cuda-out-of-memory", "passed"), ("device", "failed")])
def test_a_run_that_must_fail_passes_if_triage_knows_why(workspace: Path, rule: str, outcome: str) -> None:
    (workspace / "code").write_text("4")
    found = one_step(workspace, a_step(fails_with=rule))
    assert found.outcome == outcome
    assert found.reason.startswith("the GPU ran out of memory\n")


def test_a_run_that_must_fail_and_does_not_has_failed(workspace: Path) -> None:
    found = one_step(workspace, a_step(fails_with="device"))
    assert (found.outcome, found.reason) == ("failed", "it should have failed with device")


def test_the_reason_of_a_run_that_cannot_start_is_all_that_was_printed(workspace: Path) -> None:
    (workspace / "code").write_text("no")
    found = one_step(workspace, a_step())
    assert (found.outcome, found.reason) == ("failed", "a: b\nc: d (exit code 1)")


def is_alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_step_that_hangs_is_ended_with_all_that_it_started_and_the_next_one_runs(workspace: Path) -> None:
    hanging, next_ = a_step("hangs", limit_s=5.0), a_step(name="fsdp")
    code = trial.run_steps(
        [hanging, next_], workspace / "out", trial.Trial(time.monotonic() + WORK_S, False, workspace)
    )
    assert code == 4
    document = json.loads((workspace / "out/results.json").read_text())
    assert [(one["outcome"], one["reason"]) for one in document["steps"]] == [
        ("failed", "did not end within 5 s"),
        ("passed", ""),
    ]
    assert not is_alive(int((workspace / "left").read_text()))
    assert sorted(path.name for path in (workspace / "out").iterdir()) == ["report.md", "results.json", "steps.tar"]


def test_a_run_that_hangs_says_where_its_rank_is(workspace: Path) -> None:
    run = workspace / "runs" / RUN_ID / ".heartbeat"
    run.mkdir(parents=True)
    (run / "rank-0").write_text(f"{2**22 + 1} 1 7 3 train 0 1.0 2 0.5")
    (run / "stacks-0").write_text('Current thread 0x1 (most recent call first):\n  File "a.py", line 5 in step\n')
    where = trial._where(run.parent)
    assert where == "; rank 0 in phase train after iteration 3; a.py:5 in step"


def test_a_step_whose_records_cannot_be_read_leaves_the_others_theirs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = trial.figures
    monkeypatch.setattr(trial, "figures", lambda name, run: figures(name, run) if name == "fsdp" else 1 / 0)
    trial.run_steps(
        [a_step(), a_step(name="fsdp")], workspace, trial.Trial(time.monotonic() + WORK_S, False, workspace)
    )
    first, second = json.loads((workspace / "results.json").read_text())["steps"]
    assert (first["step"], first["outcome"], first["reason"]) == (
        "ddp",
        "failed",
        "ZeroDivisionError('division by zero')",
    )
    assert (second["step"], second["outcome"]) == ("fsdp", "passed")


def test_ctrl_c_keeps_the_steps_before(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found: Iterator[Any] = iter([measured("ddp")])

    def measure(*_: object) -> Any:
        for one in found:
            return one
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.Trial, "measure", measure)
    out = workspace / "out"
    assert trial.main(["--out", str(out), "--steps", "ddp", "fsdp"]) == 130
    assert capsys.readouterr().err == f"gpu-trial: interrupted; the steps before are in {out}/results.json\n"
    assert [one["step"] for one in results.load(out)["steps"]] == ["ddp"]


def test_steps_that_no_longer_fit_or_need_a_gpu_are_not_run(workspace: Path) -> None:
    late = one_step(workspace, steps.Step("ddp", steps.Train(DEMO), 30, 60), seconds=20.0)
    assert late.outcome == "not run"
    assert re.fullmatch(r"takes about 30 s; \d+ s are left", late.reason)
    gpu = one_step(workspace, steps.STEPS["nvidia-smi"], rehearsal=True)
    assert (gpu.outcome, gpu.reason) == ("not run", "needs a GPU")


def test_a_step_that_runs_again_replaces_its_result_and_results_do_not_mix(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    out = stored(workspace / "out", measured("ddp", "failed"), measured("zero-3"), rehearsal=True)
    assert trial.main(["--out", str(out), "--steps", "ddp", "nvidia-smi"]) == 0
    assert [(one["step"], one["outcome"]) for one in results.load(out)["steps"]] == [
        ("nvidia-smi", "not run"),
        ("ddp", "passed"),
        ("zero-3", "passed"),
    ]
    assert capsys.readouterr().out.startswith("  not run  nvidia-smi, 0 s: needs a GPU\n  passed   ddp, ")
    assert trial.main(["--out", str(stored(workspace / "gpu", measured("ddp"))), "--steps", "ddp"]) == 2
    text = f"--out: {workspace}/gpu has other results; got of a GPU; give another folder\n"
    assert capsys.readouterr().err == text


def test_a_resumed_run_continues_from_its_checkpoint_wherever_the_signal_came(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    def argv_of(train: Any, noted: Path, checkpoint: str | None, **_: object) -> list[str]:
        given.append((checkpoint or "", *train.changes))
        return [sys.executable, "-c", RUN, str(ROOT / train.config), str(noted), "0"]

    monkeypatch.setattr(trial, "argv_of", argv_of)
    of = trial.Trial(time.monotonic() + WORK_S, False, workspace / "work")
    again = a_step(name="resumed", resumes="ddp", further=20)
    assert of.measure(a_step()).outcome == "passed"
    missing = of.measure(again)
    assert (missing.outcome, missing.reason) == ("not run", "ddp has left no complete checkpoint")
    folder = f"runs/{RUN_ID}/checkpoints"
    for number in (50, 173):
        (workspace / folder / f"iter_{number:07d}").mkdir(parents=True)
        (workspace / folder / f"iter_{number:07d}" / "files.json").touch()
    (workspace / "work/resumed").rmdir()
    assert of.measure(again).outcome == "passed"
    chosen = "train.override_checkpoint=[optimizer.lr_decay_iters]"  # it follows train_iters
    assert given[-1] == (folder, chosen, "train.train_iters=193")


def test_a_checkpoint_stays_until_the_step_that_resumes_it(workspace: Path) -> None:
    folder = workspace / f"runs/{RUN_ID}/checkpoints/iter_0000005"
    folder.mkdir(parents=True)
    (folder / "files.json").touch()
    of = trial.Trial(time.monotonic() + WORK_S, False, workspace / "work")
    trial.run_steps([a_step(name="fsdp"), a_step(name="fsdp-resumed", resumes="fsdp")], workspace, of)
    assert [one["outcome"] for one in results.load(workspace)["steps"]] == ["passed", "passed"]
    assert not folder.exists()


# ---- what nvidia-smi and NCCL say ------------------------------------------------------------------


def nvidia_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_the_doctors_findings_on_what_nvidia_smi_says(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "report.xml").write_text(report(FAULTY))
    (workspace / "nvlink").write_text(NVLINKS)
    forms = {"-q\\ -x": "cat report.xml", '""': f"echo '{TABLES['580.65.06']}'", "nvlink*": "cat nvlink"}
    forms |= {"--query-gpu*": "echo GPU-0, 9.0", "*": "echo something else"}
    cases = "".join(f"{form}) {says};;\n" for form, says in forms.items())
    nvidia_smi(workspace, f'case "$*" in\n{cases}esac')
    monkeypatch.setenv("PATH", f"{workspace}:/usr/bin:/bin")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    found = one_step(workspace, steps.STEPS["nvidia-smi"])
    seen, *findings = found.reason.splitlines()
    assert seen == f"{H100} (compute capability 9.0), driver 580.65.06, CUDA 13.0"
    assert found.outcome == "failed"
    assert any(it.startswith("fail  localhost: GPU 0 needs recovery; got Reset; ") for it in findings)
    assert "warn  localhost: persistence mode of its GPUs is off; turn it on there: sudo nvidia-smi -pm 1" in findings
    kept = {path.name: path.read_text() for path in (workspace / "work/nvidia-smi").glob("nvidia-smi-*.txt")}
    assert kept.keys() == {f"nvidia-smi-{form}.txt" for form in steps.SMI}
    assert kept["nvidia-smi-topology.txt"] == "something else\n"


@pytest.mark.parametrize(
    ("said", "outcome", "reason"),
    [
        (
            "NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 100000",
            "passed",
            "two ranks of the nodes use the same GPU\n"
            "NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 100000 (logs/launcher.log)",
        ),
        ("it worked", "failed", "no rule matches this failure\nit worked"),
    ],
)
def test_two_ranks_on_one_gpu_must_be_named(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, said: str, outcome: str, reason: str
) -> None:
    monkeypatch.setattr(trial.Trial, "_execute", lambda *_: (1, f"{said}\n"))
    found = one_step(workspace, steps.STEPS["two-ranks"])
    assert (found.outcome, found.reason) == (outcome, reason)


# ---- machines on which it cannot run ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "got"),
    [
        (None, "no nvidia-smi"),
        ("echo 'No devices were found'; exit 6", "No devices were found"),
        ("exec sleep 9999", "no answer of nvidia-smi within 0.2 s"),
    ],
)
def test_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str | None, got: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(trial, "_SMI_S", 0.2 if script and "sleep" in script else STEP_S)
    if script:
        nvidia_smi(tmp_path, script)
    todo = "run it on a machine with GPUs, or rehearse it on the CPU: DS_ACCELERATOR=cpu make gpu-trial"
    assert trial.main(["--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err == f"gpu-trial: this machine has no GPU; got {got}; {todo}\n"


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


def test_what_a_step_starts_keeps_the_packages_that_were_carried_here(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/carried")
    of = trial.Trial(time.monotonic() + WORK_S, False, workspace)
    of.folder, of.deadline = workspace, time.monotonic() + STEP_S
    code, output = of._execute([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], {})
    assert (code, output) == (0, f"{ROOT}:/carried\n")
