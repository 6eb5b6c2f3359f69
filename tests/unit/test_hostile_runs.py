"""A run's folder may hold anything: each reader skips what it cannot read, or says what is wrong."""

from __future__ import annotations

import functools
import json
import operator
import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.bounded import run_bounded
from tests.cases import thinned
from tests.fuzz import CASES, in_json
from tests.patience import STEP_S
from tests.unit.report.test_page import a_run
from tridock.contracts import run_folder
from tridock.contracts.codec import decode, encode
from tridock.contracts.node_answers import Evidence, RunInfo, RunUpdate
from tridock.contracts.records import Lines, read_lines
from tridock.contracts.supervision import Supervision
from tridock.differences import flattened
from tridock.errors import RequestError
from tridock.node.agent.evidence import evidence
from tridock.node.agent.run_update import run_update
from tridock.node.agent.runs import list_runs
from tridock.report.live import LiveRun, prometheus
from tridock.report.run_tables import status_table
from tridock.trackers import notify, points
from tridock.trackers.subject import of_run
from tridock.triage import diagnose, facts_of, report

RUN = "small-20260101-000000-0a1b"
EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "run_started", "run": RUN},
    {"event": "world_formed", "world_size": 2, "backend": "gloo"},
    {"event": "model_built", "parameters": 1000, "padded_vocab_size": 128},
    {"event": "evaluation", "iteration": 2, "split": "valid", "loss": 3.5, "seconds": 0.5},
    {"event": "samples", "iteration": 2, "samples": [{"prompt": "a", "text": "b"}], "seconds": 0.1},
    {"event": "checkpoint_saved", "iteration": 2, "folder": "iter_2", "seconds": 1.0, "pause_seconds": 0.2},
    {"event": "run_restarted", "attempt": 1, "iteration": 2, "reason": "a rank", "log_bytes": 5},
    {"event": "memory_kills", "node": "n2", "processes": 1},
    {"event": "link_faults", "node": "n2", "link": "eth0", "downs": 1},
    {"event": "clock_differs", "node": "n2", "seconds": 7.5},
    {"event": "disk_nearly_full", "node": "n2", "free_bytes": 5, "total_bytes": 100},
    {"event": "run_moved", "lost": ["n3"], "nodes": ["n1"], "layout": "DP1", "world_size": 1, "reason": "x"},
    {"event": "run_finished", "iteration": 2, "device": "cpu", "peak_memory_bytes": 9, "peak_memory_by_rank": [9, 8]},
    {"event": "run_failed", "rank": 1, "node": "n2", "cause": "exception", "reason": "ValueError('x')",
     "problem": {"where": "a", "what": "b", "got": "c", "todo": "d"}},
    {"event": "rank_died", "rank": 1, "node": "n2", "exit_code": 1, "cause": "rank_exited", "reason": "exited"},
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = a_run(tmp_path / "runs" / RUN, [3.0, 2.0, 1.5], events=EVENTS)
    more = {"iteration": 4, "loss": 1.0, "phases": {"forward": 0.1}, "memory_bytes": [5, 6], "step_time_s": 0.3}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(more)}\n" * 2)
    (run / ".ranks.json").write_text('[[0, "train", 3, 0.5], [1, "train", 3, 0.5]]')
    (run / "exit_code").write_text("1\n")
    (run / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    places = {"n1": (0,), "n2": (1,)}
    supervision = Supervision("n1", places, (), master_port=1, hang_timeout_s=STEP_S)
    (run / "supervision.json").write_text(supervision.to_json())
    return run


def watched(folder: Path) -> None:
    live, update = LiveRun(folder.name), decode(RunUpdate, encode(run_update(folder, 0, 0, 0)))
    live.take(update)
    json.dumps(live.as_data(), allow_nan=False)
    prometheus([live])


def listed(folder: Path) -> None:
    runs = decode(tuple[RunInfo, ...], encode(list_runs(folder.parent.parent)))
    assert [run.run_id for run in runs] == [folder.name]
    status_table(runs)


def explained(folder: Path) -> None:
    facts = facts_of({"n1": decode(Evidence, encode(evidence(folder)))}, "n1", 1)
    assert report(facts, diagnose(facts))


def tracked(folder: Path) -> None:
    sent: dict[str, int] = {}
    list(points.unsent(Lines(folder / run_folder.METRICS).new_records(), sent))
    list(points.unsent_samples(Lines(folder / run_folder.EVENTS).new_records(), sent))
    json.dumps(sent, allow_nan=False)
    subject = of_run(folder)
    list(flattened(subject.config))
    subject.summary()
    list(notify.messages(folder.name, read_lines(folder / run_folder.EVENTS)))
    notify._reached(folder)


READERS: tuple[Callable[[Path], None], ...] = (watched, listed, explained, tracked)
COMMANDS = (
    ["report", f"runs/{RUN}"],
    ["report", f"runs/{RUN}", "-o", "page.html"],
    ["triage", f"runs/{RUN}"],
    ["runs", "--here"],
    ["runs", "--here", "--json"],
)
OTHERS = (["plan", "--from-run", f"runs/{RUN}"], ["replan", f"runs/{RUN}", "--without", "n2"],
          ["reproduce", "--run", f"runs/{RUN}", "--against", f"runs/{RUN}"])  # fmt: skip
RECORDS = ("metrics.jsonl", "events.jsonl", "plan.json", "manifest.json", ".ranks.json")


def read_all(folder: Path, commands: Sequence[list[str]] = COMMANDS, others: Sequence[list[str]] = OTHERS) -> None:
    def program(_argv: Sequence[str]) -> int:
        for read in READERS:
            read(folder)
        return 0

    run_bounded(["read"], folder, program=program).check(0)
    for command in commands:
        run_bounded(command, folder.parent.parent).check(0)
    for command in others:
        run_bounded(command, folder.parent.parent).check(0, 2, 4)


def test_a_run_as_it_should_be(folder: Path) -> None:
    read_all(folder)
    for part in ("metrics.jsonl", "events.jsonl"):
        assert len(read_lines(folder / part)) > 5


ODD = {
    "a loss of 400 digits": '{"iteration": 5, "loss": ' + "9" * 400 + "}",
    "a loss of 5000 digits": '{"iteration": 5, "loss": ' + "9" * 5000 + "}",
    "an iteration of 400 digits": '{"iteration": ' + "9" * 400 + ', "loss": 1.0}',
    "nesting": '{"iteration": 5, "loss": 1.0, "x": ' + "[" * 900 + "]" * 900 + "}",
    "endless nesting": '{"iteration": 5, "x": ' + "[" * 100_000,
    "null": '{"iteration": null, "event": null, "rank": null, "time": null, "loss": null, "phases": null}',
    "not a number": '{"iteration": 5, "event": "run_failed", "rank": NaN, "loss": NaN, "x": Infinity, "lr": -1e999}',
    "no object": 'null\n7\n[]\n""',
    "other types": '{"iteration": 5, "event": [], "rank": {}, "node": [1], "loss": "x", "phases": [1], "problem": 7,'
    ' "memory_bytes": {"a": 1}, "samples": [[]], "split": {}, "log_bytes": "x", "device": [], "time": {}}',
    "control characters": '{"iteration": 5, "event": "rank_died", "rank": 0, "node": "\\u001b[2J", "split": "\\u009b",'
    ' "device": "\\u0007", "reason": "\\u001b[31m\\u202e", "problem": {"where": "\\u001b[2J", "what": "", "got": "",'
    ' "todo": ""}}',
}


@pytest.mark.parametrize("case", thinned(ODD, ("a loss of 400 digits", "nesting", "null", "control characters")))
def test_one_odd_record_ends_no_reader(case: str, folder: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder / name).open("a") as file:
            file.write(f"{ODD[case]}\n")
    read_all(folder, COMMANDS[:3], ())


@pytest.mark.parametrize("seed", thinned(range(CASES), (1, 5)))
def test_whatever_its_records_hold(seed: int, folder: Path) -> None:
    rng = random.Random(f"records {seed}")
    for name in rng.sample(RECORDS, rng.randint(1, 3)):
        path = folder / name
        lines = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(lines))
            lines[place] = in_json(rng, lines[place])
        path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogatepass"))
    read_all(folder, rng.sample(COMMANDS, 1), rng.sample(OTHERS, 1))


NO_FILES: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "FIFO": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_ends_no_reader(kind: str, folder: Path) -> None:
    def read(_argv: Sequence[str]) -> int:
        names = ("exit_code", "hostfile", "experiment.yaml", "logs/rank-1.log", "logs/launcher.log")
        for name in (*RECORDS, *names):
            run = folder.parent.parent / name.replace("/", "-") / "runs" / RUN
            shutil.copytree(folder, run)
            (run / "logs").mkdir(exist_ok=True)
            (run / name).unlink(missing_ok=True)
            NO_FILES[kind](run / name)
            listed(run)
            for reader in (watched, explained, tracked):
                with suppress(RequestError):  # names the file
                    reader(run)
        return 0

    run_bounded(["read"], folder, seconds=10, program=read).check(0)


@pytest.mark.parametrize("place", [("memory",), ("ranks", 0, "pp"), ("cost",), ("world_size",)])
@pytest.mark.parametrize("odd", thinned([None, [], "x", 10**15], (None, "x")))
def test_an_odd_value_in_a_plan_ends_no_reader(place: tuple[Any, ...], odd: object, folder: Path) -> None:
    *places, last = place
    plan = json.loads((folder / "plan.json").read_text())
    functools.reduce(operator.getitem, places, plan)[last] = odd
    (folder / "plan.json").write_text(json.dumps(plan))
    read_all(folder, COMMANDS[:1], ())
