"""`make gpu-trial`: what this machine's GPU does with Tridock, in five blocks of at most ten minutes.

Each step of a block becomes one measurement in ``results.json``, and a row of the tables in docs/results.md. A block
that is run again replaces its own measurements. ``DS_ACCELERATOR=cpu`` rehearses the blocks with tiny models on the
CPU: without the steps that need a GPU, and without the page.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal
from xml.etree import ElementTree

from trial_blocks import BLOCKS, COLLIDE, ROOT, SMI, Step, Train, argv_of

from tridock.bench.output import versions
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.checkpoints import newest
from tridock.contracts.devices import listed_devices
from tridock.contracts.events import Event, events_of
from tridock.contracts.records import read_metrics, read_plan
from tridock.data.corpus import prepare_demo
from tridock.errors import EXIT_INTERRUPTED, ClusterError, Problem, RequestError, RunError, TridockError
from tridock.node.probes.accelerators import parse
from tridock.ops.runs.local_run import triage_here
from tridock.plan.memory import OVERHEAD
from tridock.report.summary import summarize
from tridock.triage import RULES

BEGIN, END = "<!-- GPU trial: written by make gpu-trial -->", "<!-- end of GPU trial -->"
Outcome = Literal["passed", "failed", "skipped"]
_STOP_S: Final = 60.0
"""Until a run that is interrupted has ended on all ranks. One that is left behind would hold the GPU."""


# ---- what was measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of one step, or of one test. None and an empty text stand for what it does not have."""

    block: int
    step: str
    outcome: Outcome
    seconds: float
    detail: str = ""
    """Why it failed or was skipped; the message of a failure that was wanted."""
    run: str = ""
    device: str = ""
    first_loss: float | None = None
    last_loss: float | None = None
    step_s: float | None = None
    """The median of all steps but the first."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    pause_s: float | None = None
    """For how long training paused for its first checkpoint, which is written in the background."""
    peak_bytes: int | None = None
    planned_bytes: int | None = None
    """The plan's total without context, NCCL and fragmentation, which torch does not count as allocated."""


COLUMNS: Final[Mapping[str, Callable[[Measurement], str]]] = {
    "step": lambda one: one.step,
    "result": lambda one: one.outcome,
    "loss": lambda one: _text(one.first_loss, ".4f") and f"{one.first_loss:.4f} to {one.last_loss:.4f}",
    "time of a step": lambda one: _text(one.step_s and one.step_s * 1e3, ",.1f", " ms"),
    "tokens/s": lambda one: _text(one.tokens_per_second, ",.0f"),
    "MFU": lambda one: _text(one.mfu, ".1%"),
    "pause for a checkpoint": lambda one: _text(one.pause_s, ".2f", " s"),
    "peak memory": lambda one: _text(one.peak_bytes and one.peak_bytes / 2**30, ".2f", " GiB"),
    "planned": lambda one: _text(one.planned_bytes and one.planned_bytes / 2**30, ".2f", " GiB"),
    "error of the plan": lambda one: _text(
        one.planned_bytes / one.peak_bytes - 1 if one.planned_bytes and one.peak_bytes else None, "+.1%"
    ),
    "took": lambda one: f"{one.seconds:.0f} s",
    "message": lambda one: one.detail.replace("|", "\\|"),
}


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else format(value, form) + unit


def tables(measurements: Sequence[Measurement], machine: Mapping[str, str]) -> str:
    """A table for each block, without the columns that it has no figures for."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()) + "."]
    for number, (title, _, _) in BLOCKS.items():
        rows = [{name: column(one) for name, column in COLUMNS.items()} for one in measurements if one.block == number]
        used = [name for name in COLUMNS if any(row[name] for row in rows)]
        if rows:
            lines += ["", f"**Block {number}: {title}** (`make gpu-trial BLOCK={number}`)", ""]
            lines += [f"| {' | '.join(used)} |", f"|{'---|' * len(used)}"]
            lines += [f"| {' | '.join(row[name] for name in used)} |" for row in rows]
    return "\n".join(lines)


def with_tables(page: str, measurements: Sequence[Measurement], machine: Mapping[str, str]) -> str:
    """The page with its tables brought up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables(measurements, machine)}\n{END}{after}"


# ---- running it ------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A block in progress: where its files go, and when it has to end."""

    folder: Path
    rehearsal: bool
    block: int
    deadline: float
    runs: dict[str, str] = field(default_factory=dict)
    """The run's id of each step."""

    def measure(self, steps: Sequence[Step]) -> Iterator[Measurement]:
        for step in steps:
            began = time.monotonic()
            if self.rehearsal and step.needs_gpu:
                yield Measurement(self.block, step.name, "skipped", 0.0, "needs a GPU")
            elif began >= self.deadline:
                yield Measurement(self.block, step.name, "failed", 0.0, "the block's time was over")
            else:
                try:
                    for one in self._measure(step):
                        yield replace(one, seconds=one.seconds or time.monotonic() - began)
                except Exception as error:  # the other steps are worth their figures
                    yield Measurement(self.block, step.name, "failed", time.monotonic() - began, repr(error))

    def _measure(self, step: Step) -> Iterator[Measurement]:
        if isinstance(step.what, Train):
            yield self._train(step.name, step.what)
        elif step.what == COLLIDE:
            yield self._collide(step.name)
        elif step.what.startswith("tests/"):
            yield from self._tests(step.what)
        else:
            yield self._nvidia_smi(step.name)

    def _train(self, name: str, train: Train) -> Measurement:
        noted = self.folder / "run-id"
        noted.unlink(missing_ok=True)
        checkpoint = None
        if train.resumes:
            if train.resumes not in self.runs:
                return Measurement(self.block, name, "failed", 0.0, f"{train.resumes} has left no checkpoint")
            checkpoint = f"runs/{self.runs[train.resumes]}/{run_folder.CHECKPOINTS}"
            if (saved := newest(Path(checkpoint))) is None:
                return Measurement(self.block, name, "failed", 0.0, f"{checkpoint} contains no complete checkpoint")
            train = replace(train, changes=(*train.changes, f"train.train_iters={saved[0] + train.further}"))
        argv = argv_of(train, noted, checkpoint, tiny=self.rehearsal)
        code, output = self._execute(argv, train.env, lambda process: self._disturb(process, noted, train.signal_after))
        run = Path("runs", noted.read_text().strip()) if noted.exists() else None
        got = f"exit code {code}, {train.exit_code} expected: {_last_line(output)}"
        if run is None:
            return Measurement(self.block, name, "failed", 0.0, got)
        self.runs[name] = run.name
        found = figures(self.block, name, run)
        if train.fails_with:
            detail, known = _failure(run)
            return replace(found, outcome="passed" if train.fails_with in known else "failed", detail=detail)
        if code != train.exit_code:
            return replace(found, outcome="failed", detail=got)
        if train.signal_after and train.signal_after[1] is signal.SIGKILL and not events_of(run, Event.RUN_RESTARTED):
            return replace(found, outcome="failed", detail="the run has not been restarted")
        return found

    def _disturb(self, process: subprocess.Popen[str], noted: Path, after: tuple[int, signal.Signals] | None) -> None:
        """Sends the signal once the run has come that far, or returns when it has ended."""
        while after is not None and process.poll() is None and time.monotonic() < self.deadline:
            time.sleep(0.05)
            beat = heartbeat.read(Path("runs", noted.read_text().strip()), 0) if noted.exists() else None
            if beat is None or beat.iteration < after[0]:
                continue
            os.kill(process.pid if after[1] is signal.SIGTERM else beat.pid, after[1])
            return

    def _collide(self, name: str) -> Measurement:
        world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 0]}).encode()).decode()
        argv = [sys.executable, "-P", "-m", "tridock.train.allreduce", "--world", world, "--node-rank", "0"]
        argv += ["--master-addr", "127.0.0.1", "--master-port", "29511", "--limit", "90"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        _, output = self._execute(argv, {"PYTHONPATH": path})
        rule = next(rule for rule in RULES if rule.name == "duplicate-gpu")
        known = rule.says is not None and rule.says.search(output) is not None
        return Measurement(self.block, name, "passed" if known else "failed", 0.0, _last_line(output))

    def _nvidia_smi(self, name: str) -> Measurement:
        """Keeps what the driver prints, and reads it as the doctor does."""
        printed = {}
        for form, options in SMI.items():
            _, printed[form] = self._execute(["nvidia-smi", *options], {})
            run_folder.write_atomic(self.folder / f"nvidia-smi-{form}.txt", printed[form].encode())
        found = parse(printed["report"], printed["table"], printed["nvlink"], printed["capability"])
        known = found.gpus and found.driver and found.cuda
        detail = f"{len(found.gpus or ())} GPUs, driver {found.driver}, CUDA {found.cuda}"
        return Measurement(self.block, name, "passed" if known else "failed", 0.0, detail)

    def _tests(self, path: str) -> Iterator[Measurement]:
        report = self.folder / f"block-{self.block}.xml"
        report.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "pytest", "--confcutdir", "tests/gpu", path, f"--junitxml={report}"]
        code, output = self._execute(argv, {}, cwd=ROOT)
        if not report.exists():
            yield Measurement(self.block, path, "failed", 0.0, f"exit code {code}: {_last_line(output)}")
            return
        cases = list(measurements_of(self.block, report.read_text()))
        yield from cases
        if code and all(one.outcome != "failed" for one in cases):
            yield Measurement(self.block, path, "failed", 0.0, f"exit code {code}: {_last_line(output)}")

    def _execute(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        during: Callable[[subprocess.Popen[str]], None] = lambda _: None,
        cwd: Path | None = None,
    ) -> tuple[int, str]:
        """Exit code and output. At the end of the block's time it is interrupted, as by Ctrl-C."""
        log = self.folder / "output.log"
        with log.open("w") as out, subprocess.Popen(
            argv, env={**os.environ, **env}, cwd=cwd, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                during(process)
                process.wait(max(1.0, self.deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                if isinstance(error, KeyboardInterrupt):
                    raise
        return process.returncode, log.read_text(errors="replace")


def figures(block: int, name: str, run: Path) -> Measurement:
    """What a run has recorded."""
    summary = summarize(run)
    steps = [entry["step_time_s"] for entry in read_metrics(run)[0][1:] if "step_time_s" in entry]
    stages = read_plan(run).get("memory", {}).get("stages", ())
    planned = [sum(term["bytes"] for term in stage["terms"] if term["name"] not in OVERHEAD) for stage in stages]
    ends, saves = events_of(run, Event.RUN_FINISHED), events_of(run, Event.CHECKPOINT_SAVED)
    return Measurement(
        block,
        name,
        "passed",
        0.0,
        run=run.name,
        device=ends[-1].get("device", "") if ends else "",
        first_loss=summary.first_loss,
        last_loss=summary.last_loss,
        step_s=statistics.median(steps) if steps else None,
        tokens_per_second=summary.tokens_per_second,
        mfu=summary.mfu,
        pause_s=saves[0]["pause_seconds"] if len(saves) > 1 else None,
        peak_bytes=summary.peak_memory_bytes,
        planned_bytes=max(planned, default=None),
    )


def _failure(run: Path) -> tuple[str, set[str]]:
    """The error of a failed run, and by what it is known: triage's rule, the ``where`` of Tridock's own message."""
    try:
        found = triage_here(run)
    except RequestError as error:  # it has not failed
        return str(error), set()
    events = events_of(run, Event.RUN_FAILED)
    problem = events[0].get("problem") or {} if events else {}
    return str(events[0].get("reason", "")) if events else str(found), {found.rule, problem.get("where", "")}


def measurements_of(block: int, junit: str) -> Iterator[Measurement]:
    """A measurement for each test of pytest's JUnit file, with the figures that the test has recorded."""
    for case in ElementTree.fromstring(junit).iter("testcase"):  # noqa: S314 (pytest has written it)
        failed = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        outcome: Outcome = "failed" if failed is not None else "skipped" if skipped is not None else "passed"
        reason = failed if failed is not None else skipped
        detail = "" if reason is None else _last_line(reason.attrib.get("message", ""))
        recorded = {it.attrib["name"]: int(it.attrib["value"]) for it in case.iter("property")}
        name = case.attrib["name"].removeprefix("test_")
        yield Measurement(
            block, name, outcome, float(case.attrib["time"]), detail,
            peak_bytes=recorded.get("peak_bytes"), planned_bytes=recorded.get("planned_bytes"),
        )  # fmt: skip


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def check_machine() -> bool:
    """Whether this is a rehearsal on the CPU. Raises :class:`ClusterError` on a machine whose GPU torch cannot use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
        got = _last_line(listed.stdout + listed.stderr)
    except FileNotFoundError:
        listed, got = None, "no nvidia-smi"
    if listed is None or not listed_devices(listed.stdout):
        todo = "run it on a machine with GPUs, or rehearse it on the CPU: DS_ACCELERATOR=cpu make gpu-trial"
        raise ClusterError(Problem("gpu-trial", "this machine has no GPU", got, todo))
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; torch.cuda.init()"], capture_output=True, text=True, check=False
    )
    if torch.returncode:
        todo = "install torch's CUDA build (make venv FLAVOR=gpu), or see what nvidia-smi and tridock check say"
        raise ClusterError(Problem("gpu-trial", "torch has no GPU here", _last_line(torch.stderr), todo))
    return False


def load(folder: Path) -> list[Measurement]:
    """The measurements of earlier blocks."""
    path = folder / "results.json"
    return [Measurement(**one) for one in json.loads(path.read_text())["measurements"]] if path.exists() else []


def store(folder: Path, measurements: Sequence[Measurement], machine: Mapping[str, str]) -> None:
    document: dict[str, Any] = {"machine": machine, "measurements": [asdict(one) for one in measurements]}
    run_folder.write_atomic(folder / "results.json", (json.dumps(document, indent=2) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the blocks; 0 if every step passed or was skipped, 4 if one failed, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, nargs="*", choices=BLOCKS, metavar="N", help="1 to 5 (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-trial"), help="default: runs/gpu-trial")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/results.md", help="default: docs/results.md")
    given = parser.parse_args(arguments)
    try:
        rehearsal = check_machine()
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    try:
        return _measure_blocks(given, rehearsal)
    except KeyboardInterrupt:
        print(f"gpu-trial: interrupted; the steps before are in {given.folder}/results.json", file=sys.stderr)
        return EXIT_INTERRUPTED


def _measure_blocks(given: argparse.Namespace, rehearsal: bool) -> int:
    given.folder = given.folder.resolve()  # tests run in another folder
    given.folder.mkdir(parents=True, exist_ok=True)
    prepare_demo(Path("data/demo"), report=lambda _: None)
    measurements, code = load(given.folder), 0
    for number in given.block or BLOCKS:
        title, limit, steps = BLOCKS[number]
        print(f"block {number}: {title}, at most {math.ceil(limit / 60)} min", flush=True)
        trial = Trial(given.folder, rehearsal, number, time.monotonic() + limit)
        measurements = [one for one in measurements if one.block != number]
        for one in trial.measure(steps):
            print(f"  {one.outcome:8} {one.step}, {one.seconds:.0f} s{one.detail and f': {one.detail}'}", flush=True)
            code = RunError.exit_code if one.outcome == "failed" else code
            measurements.append(one)
            devices = {one.device for one in measurements if one.device}
            machine = {"On": ", ".join(sorted(devices)) or "no device", **versions()}
            measurements.sort(key=lambda one: one.block)
            store(given.folder, measurements, machine)
    if not rehearsal:
        given.page.write_text(with_tables(given.page.read_text(), measurements, machine))
    return code


if __name__ == "__main__":
    sys.exit(main())
