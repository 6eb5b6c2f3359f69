"""What this machine's GPU does with Tridock: one command, at most eight minutes, what tells most first.

Each step (tools/trial_steps.py) has a limit, a log and a result of its own. The folder of --out gets results.json and
report.md, both whole after every step, and steps.tar with each step's log and the records of its run. It needs torch,
the packages of tools/gpu-wheels.sh and no network; runs/ and data/ are made in the current folder. DS_ACCELERATOR=cpu
rehearses it with tiny models on the CPU, without the steps that need a GPU.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from trial_results import ARCHIVE, RESULTS, Measurement, Outcome, archive, load, publish, store
from trial_steps import ROOT, SMI, STEPS, Step, Train, argv_of, chosen

from tridock.bench.output import versions
from tridock.cluster.settings import load_cluster
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.checkpoints import newest
from tridock.contracts.codec import decode
from tridock.contracts.devices import listed_devices
from tridock.contracts.events import Event, events_of
from tridock.contracts.node_answers import NodeReport
from tridock.contracts.records import read_metrics, read_plan
from tridock.data.corpus import prepare_demo
from tridock.errors import EXIT_INTERRUPTED, ClusterError, Problem, RequestError, RunError, TridockError, cut
from tridock.node.agent.rank_status import RankMonitor, main_thread
from tridock.ops.checks.devices import device_findings, gpu_host_command, parse_gpu_host
from tridock.ops.runs.local_run import HERE, triage_here
from tridock.ops.runs.this_machine import free_port, node_argv, node_environment
from tridock.plan.memory import OVERHEAD
from tridock.report.summary import summarize
from tridock.triage import Diagnosis, Facts, diagnose

_MARK: Final = "GPU_TRIAL_STEP"
"""In the environment of everything that a step starts, also of what has left its session."""
_SLOWER: Final = 5
"""By how much a busy CPU may be, with a tiny model."""
_SMI_S: Final = 60.0
_END_S: Final = 8.0
"""Until everything that a step has started is gone, and its result is written."""


@dataclass
class Trial:
    """A trial in progress; ``until`` is the end of its budget on the monotonic clock, ``work`` a folder for logs."""

    until: float
    rehearsal: bool
    work: Path
    runs: dict[str, Path] = field(default_factory=dict)
    """The run of each step that has started one."""
    folder: Path = field(init=False)
    """The step's own files."""
    limit_s: float = field(init=False)
    deadline: float = field(init=False)

    def measure(self, step: Step) -> Measurement:
        """Runs a step. Whatever it does, it ends in time, and nothing of it is left behind."""
        began = time.monotonic()
        left = self.until - began - _END_S
        if self.rehearsal and step.needs_gpu:
            return Measurement(step.name, "not run", "needs a GPU")
        if left < (1 if self.rehearsal else step.expected_s):
            return Measurement(step.name, "not run", f"takes about {step.expected_s} s; {max(0, left):.0f} s are left")
        self.folder = self.work / step.name
        self.limit_s = min(step.limit_s * (_SLOWER if self.rehearsal else 1), left)
        self.deadline = began + self.limit_s
        self.folder.mkdir()
        try:
            if isinstance(step.what, Train):
                found = self._train(step.name, step.what)
            else:
                found = (self._nvidia_smi if step.what == "nvidia-smi" else self._two_ranks)(step.name)
        except Exception as error:  # the other steps are worth their figures
            found = Measurement(step.name, "failed", repr(error))
        return replace(found, seconds=round(time.monotonic() - began, 1))

    def _train(self, name: str, train: Train) -> Measurement:
        noted, checkpoint = self.folder / "run-id", None
        if train.resumes:
            checkpoint = f"{self.runs.get(train.resumes, 'no run')}/{run_folder.CHECKPOINTS}"
            if (saved := newest(Path(checkpoint))) is None:
                return Measurement(name, "not run", f"{train.resumes} has left no complete checkpoint")
            schedule = "train.override_checkpoint=[optimizer.lr_decay_iters]"
            more = f"train.train_iters={saved[0] + train.further}"
            train = replace(train, changes=(*train.changes, schedule, more))
        argv = argv_of(train, noted, checkpoint, tiny=self.rehearsal)
        code, output = self._execute(argv, train.env, noted, train.signal_after)
        if (run := _run(noted)) is None:
            return Measurement(name, "failed", self._late(code) or f"{_end_of(output)} (exit code {code})")
        self.runs[name] = run
        found = figures(name, run)
        if code is None:
            return replace(found, outcome="failed", reason=self._late(code) + _where(run))
        if code != train.exit_code:
            reason, known = why(run)
            passed = code == RunError.exit_code and train.fails_with in known
            reason = (reason or _end_of(output)) + ("" if passed else f" (exit code {code})")
        else:
            reason = f"it should have failed with {train.fails_with}" if train.fails_with else ""
            reason = reason or ("" if self.rehearsal else missing(found, train, run))
            passed = not reason
        return replace(found, outcome="passed" if passed else "failed", reason=reason)

    def _two_ranks(self, name: str) -> Measurement:
        world = base64.urlsafe_b64encode(json.dumps({HERE: [0, 0]}).encode()).decode()
        argv = [sys.executable, "-P", "-m", "tridock.train.allreduce", "--world", world, "--node-rank", "0"]
        argv += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--limit", "50"]
        code, output = self._execute(argv, {})
        found = diagnose(Facts(code, launcher=output))
        outcome: Outcome = "passed" if found.rule == "duplicate-gpu" else "failed"
        return Measurement(name, outcome, self._late(code) or _reason(found, _end_of(output)))

    def _nvidia_smi(self, name: str) -> Measurement:
        """Keeps what the driver prints, and reports what the doctor reads and finds on this machine."""
        for form, options in SMI.items():
            _, printed = self._execute(["nvidia-smi", *options], {})
            (self.folder / f"nvidia-smi-{form}.txt").write_text(printed)
        code, output = self._execute([*node_argv(), "node-report", "--workspace", str(Path.cwd())], {})
        if code != 0:
            return Measurement(name, "failed", self._late(code) or _end_of(output))
        report = decode(NodeReport, output.splitlines()[-1].encode())
        _, host = self._execute(gpu_host_command().argv, {})
        gpus = report.accelerators.gpus or ()
        hostfile = self.folder / "hostfile"
        hostfile.write_text(f"{HERE} slots={max(1, len(gpus))}\n")
        findings = list(device_findings(load_cluster(hostfile), {HERE: report}, {HERE: parse_gpu_host(host)}))
        read = [gpu.capability for gpu in gpus] + [report.accelerators.driver, report.accelerators.cuda]
        known = bool(gpus) and all(read) and all(finding.severity == "warn" for finding in findings)
        names = ", ".join(f"{gpu.name} (compute capability {gpu.capability})" for gpu in gpus) or "no GPU"
        seen = f"{names}, driver {report.accelerators.driver}, CUDA {report.accelerators.cuda}"
        return Measurement(name, "passed" if known else "failed", "\n".join([seen, *map(str, findings)]))

    def _late(self, code: int | None) -> str:
        return f"did not end within {self.limit_s:.0f} s" if code is None else ""

    def _execute(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        noted: Path | None = None,
        after: tuple[int, signal.Signals] | None = None,
    ) -> tuple[int | None, str]:
        """Exit code and output of a command; no code if its time was over. Nothing that it has started is left.

        ``noted`` is the file with the id of its run, which gets the signal of ``after``, and whose stacks go to its log
        when the time is over.
        """
        mark, log = f"{os.getpid()}-{self.folder.name}", self.folder / "output.log"
        with log.open("a") as out:
            begin = out.tell()
            process = subprocess.Popen(
                argv, env={**node_environment(1), **env, _MARK: mark}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            while (code := process.poll()) is None and time.monotonic() < self.deadline:
                time.sleep(0.05)
                run = _run(noted) if after else None
                beat = heartbeat.read(run, 0) if run else None
                if after and beat and beat.iteration >= after[0]:
                    os.kill(process.pid if after[1] is signal.SIGTERM else beat.pid, after[1])
                    after = None
            if code is None and (run := _run(noted)) is not None:
                RankMonitor(run, (0,)).stacks((0,))
        finally:
            process.kill()
            end_all(mark)
            process.wait(_END_S)
        return code, log.read_bytes()[begin:].decode(errors="replace")


def _run(noted: Path | None) -> Path | None:
    return Path("runs", noted.read_text().strip()) if noted is not None and noted.exists() else None


def _where(run: Path) -> str:
    """How far rank 0 has come, and where its main thread is."""
    beat = heartbeat.read(run, 0)
    frames = main_thread(run_folder.read_text(heartbeat.stacks_path(run, 0)))
    at = "no rank has started" if beat is None else f"rank 0 in phase {beat.phase} after iteration {beat.iteration}"
    return "; ".join([f"; {at}", *frames[:4]])


def end_all(mark: str) -> None:
    """Kills every process with a step's mark in its environment."""
    wanted, deadline = f"{_MARK}={mark}".encode(), time.monotonic() + _END_S
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if wanted in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    found = True
        time.sleep(0.05)


def figures(name: str, run: Path) -> Measurement:
    """What a run has recorded."""
    summary = summarize(run)
    steps = [entry["step_time_s"] for entry in read_metrics(run)[0][1:] if "step_time_s" in entry]
    stages = read_plan(run).get("memory", {}).get("stages", ())
    planned = [sum(term["bytes"] for term in stage["terms"] if term["name"] not in OVERHEAD) for stage in stages]
    ends, saves = events_of(run, Event.RUN_FINISHED), events_of(run, Event.CHECKPOINT_SAVED)
    return Measurement(
        name,
        "passed",
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


def missing(found: Measurement, train: Train, run: Path) -> str:
    """What a run that has ended well did not do on a GPU; empty if nothing."""
    if train.exit_code == 0 and found.device in ("", "cpu"):
        return f"it ran on {found.device or 'no device'}"
    if train.falls and (found.first_loss or 0.0) - (found.last_loss or 0.0) < train.falls:
        return f"the loss did not fall by {train.falls:g}"
    if train.within is not None and (found.plan_error is None or abs(found.plan_error) > train.within):
        return f"the planned memory is not within {train.within:.0%} of what was allocated"
    if train.signal_after and train.signal_after[1] is signal.SIGKILL and not events_of(run, Event.RUN_RESTARTED):
        return "the run has not been restarted"
    return ""


def why(run: Path) -> tuple[str, set[str]]:
    """Cause and evidence by triage, and by what they are known: the rule, the ``where`` of Tridock's own message."""
    try:
        error = triage_here(run)
    except RequestError:  # it has not failed
        return "", set()
    facts, own = error.facts, error.facts.own_error
    known = {error.diagnosis.rule} | ({own.where} if own else set())
    return _reason(error.diagnosis, facts.reason or facts.launcher), known


def _reason(diagnosis: Diagnosis, said: str) -> str:
    return "\n".join(filter(None, [diagnosis.cause, diagnosis.seen or _end_of(said)]))


def _end_of(text: str) -> str:
    """The last lines of a program's output, without a terminal's codes."""
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines() if line.strip()]
    return cut("\n".join(lines[-5:]), 800)


def check_machine() -> bool:
    """Whether this is a rehearsal on the CPU. Raises :class:`ClusterError` on a machine without GPUs."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return True
    argv = ["nvidia-smi", "--list-gpus"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_SMI_S)
    except FileNotFoundError:
        got = "no nvidia-smi"
    except subprocess.TimeoutExpired:
        got = f"no answer of nvidia-smi within {_SMI_S:g} s"
    else:
        if listed_devices(done.stdout):
            return False
        got = _end_of(done.stdout + done.stderr)
    todo = "run it on a machine with GPUs, or rehearse it on the CPU: DS_ACCELERATOR=cpu make gpu-trial"
    raise ClusterError(Problem("gpu-trial", "this machine has no GPU", got, todo))


def run_steps(steps: Sequence[Step], out: Path, trial: Trial) -> int:
    """Runs the steps, and writes what is known after each; 4 if one has failed, else 0."""
    results = load(out)
    if results["rehearsal"] not in (None, trial.rehearsal):
        got = "of a rehearsal on the CPU" if results["rehearsal"] else "of a GPU"
        raise RequestError(Problem("--out", f"{out} has other results", got, "give another folder"))
    prepare_demo(Path("data/demo"), report=lambda _: None)
    found = {one["step"]: one for one in results["steps"]}
    code = 0
    for number, step in enumerate(steps):
        one = trial.measure(step)
        reason = one.reason.replace("\n", "\n           ")
        print(f"  {one.outcome:8} {step.name}, {one.seconds:.0f} s{reason and f': {reason}'}", flush=True)
        code = RunError.exit_code if one.outcome == "failed" else code
        found[step.name] = asdict(one)
        steps_ = [found[name] for name in STEPS if name in found]
        devices = ", ".join(sorted({it["device"] for it in steps_} - {""})) or "no device"
        store(out, {"rehearsal": trial.rehearsal, "machine": {"On": devices, **versions()}, "steps": steps_})
        with suppress(OSError):  # the results matter more
            archive(out / ARCHIVE, step.name, [trial.work / step.name, *filter(None, [trial.runs.get(step.name)])])
        awaited = {later.what.resumes for later in steps[number + 1 :] if isinstance(later.what, Train)}
        for name in trial.runs.keys() - awaited:  # one of 1.3B takes 16 GB
            shutil.rmtree(trial.runs[name] / run_folder.CHECKPOINTS, ignore_errors=True)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every step passed or was not run, 4 if one failed, 130 if interrupted, 2 and 3 if it cannot begin."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-trial"), help="default: runs/gpu-trial")
    parser.add_argument("--steps", nargs="+", default=[], metavar="STEP", help="names, numbers of rows (default: all)")
    parser.add_argument("--budget", type=float, default=480.0, metavar="SECONDS", help="for all of it (default: 480)")
    text = "run nothing, and write the results in these folders to docs/results.md"
    parser.add_argument("--publish", nargs="+", type=Path, metavar="FOLDER", help=text)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if given.publish:
            publish(given.publish, ROOT / "docs/results.md")
            return 0
        steps, rehearsal = chosen(given.steps), check_machine()
        given.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="gpu-trial-") as work:
            if not os.access(Path("~").expanduser(), os.W_OK):  # where compilers keep what they made
                os.environ["HOME"] = work
            return run_steps(steps, given.out, Trial(began + given.budget, rehearsal, Path(work)))
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"gpu-trial: interrupted; the steps before are in {given.out}/{RESULTS}", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
