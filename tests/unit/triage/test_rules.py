"""Rules: the order in which they are asked, upstream's texts, the list in docs/triage.md."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.triage import PROVOKED
from tridock.contracts.events import Cause, Event
from tridock.contracts.node_answers import Evidence
from tridock.triage import RULES, Diagnosis, Facts, diagnose, report
from tridock.triage.diagnosis import OWN_MESSAGE
from tridock.triage.facts import Step, facts_of, stuck_rank
from tridock.triage.first_failure import FirstFailure

ROOT = Path(__file__).parents[3]


def failed(reason: str, kind: str = "run_failed", **fields: object) -> Facts:
    event = {"event": kind, "rank": 1, "reason": reason, "time": "2026-01-02T03:04:05.678+00:00", **fields}
    return Facts(4, FirstFailure(1, "b", reason, seen=kind != "run_failed", event=event), reason)


def seen(cause: Cause, reason: str) -> Facts:
    return failed(reason, cause.event, cause=cause)


def launched(text: str) -> Facts:
    return Facts(4, launcher=text)


# What cannot be done to a machine without GPUs, or takes a minute: texts from upstream's source, and from reports.
TORCHRUN = """\
host-b: Root Cause (first observed failure):
host-b: [0]:
host-b:   time      : 2026-11-23_13:00:08
host-b:   host      : host-b
host-b:   rank      : 1 (local_rank: 0)
host-b:   exitcode  : -9 (pid: 183)  (SIGKILL)
host-b:   error_file: <N/A>
"""
RECORDED = {
    "torchrun-root-cause": replace(seen(Cause.LAUNCHER_EXITED, "ended with exit code 1"), launcher=TORCHRUN),
    "collective-hang": seen(
        Cause.COLLECTIVE_HUNG,
        "hangs, as do all 2 ranks: a collective that does not end at x.py:1 in f; no progress for 31 s",
    ),
    "program-silent": seen(Cause.PROGRAM_SILENT, "is silent: no output and no processor time for 1801 s"),
    "rank-hung": seen(Cause.RANK_HUNG, "hangs while others wait for it at x.py:1 in f; no progress for 31 s"),
    "head-lost": seen(Cause.HEAD_SILENT, "heard nothing from the head for 21 s"),
    "node-lost": seen(Cause.NODE_SILENT, "has not answered for 21 s"),
    "oom-killed-on-host": Facts(
        137,
        FirstFailure(1, "b", "was ended by SIGKILL after iteration 3", event={"event": "rank_died", "rank": 1}),
        "was ended by SIGKILL after iteration 3",
        kernel=("Out of memory: Killed process 77 (python) total-vm:1kB",),
    ),
    "worker-killed-for-memory": replace(
        seen(Cause.RANK_EXITED, "exited with code 1"),
        log="RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. \n",
        killed={"b": 1},
    ),
    "process-killed-for-memory": replace(seen(Cause.RANK_EXITED, "exited with code 1"), killed={"b": 2}),
    "cuda-out-of-memory": failed(
        "OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB')"
    ),
    "launcher-missing-program": launched("RuntimeError: launcher 'pdsh' not installed.\n"),
    "nccl-error": failed("DistBackendError('NCCL error in: x.cpp:1, ncclInternalError: Internal check failed.')"),
    "nccl-cannot-connect": failed("Last error:\nConnect to 198.51.100.14<52822> failed : No route to host"),
    "user-buffers": failed(
        "RuntimeError: /opt/transformer-engine/transformer_engine/pytorch/csrc/userbuffers/userbuffers-host.cpp:208 in "
        "function create_communicator_grouped2: CUDA Error: operation not supported"
    ),
    "duplicate-gpu": failed("Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"),
    "cuda-driver": failed(
        "RuntimeError('The NVIDIA driver on your system is too old (found version 12040). Please update your GPU')"
    ),
    "cuda-architecture": failed(
        "AcceleratorError('CUDA error: no kernel image is available for execution on the device')"
    ),
    "gpu-fault": failed("AcceleratorError('CUDA error: an illegal memory access was encountered')"),
    "extension-not-built": failed("RuntimeError(\"Error building extension 'fused_adam'\")"),
}


@pytest.mark.parametrize(
    ("facts", "rule"),
    [
        (failed("AcceleratorError('CUDA error: an illegal memory access was encountered')"), "gpu-fault"),
        (failed("x", problem={"where": "train", "what": "is wrong", "got": "", "todo": "mend it"}), OWN_MESSAGE),
    ],
)
def test_a_kill_for_memory_stands_beside_another_cause(facts: Facts, rule: str) -> None:
    found = diagnose(replace(facts, killed={"a": 2}))
    assert found.rule == rule
    assert found.cause == f"{diagnose(facts).cause}; the kernel killed processes for memory in this attempt: 2 on a"


def test_a_rank_killed_for_memory_needs_no_note() -> None:
    facts = seen(Cause.RANK_KILLED_FOR_MEMORY, "was killed by the kernel, out of memory")
    assert diagnose(replace(facts, killed={"b": 1})) == diagnose(facts)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_texts(name: str) -> None:
    found = diagnose(RECORDED[name])
    assert found.rule == name
    assert "{" not in found.cause + found.remedy


def test_a_module_that_was_not_copied_is_no_fault_of_the_image_alone() -> None:
    found = diagnose(failed("ModuleNotFoundError: No module named 'mine'"))
    assert (found.rule, found.remedy.partition(";")[0]) == (
        "import",
        "for a module of your own folder (tridock run), see what the start called not copied, and what git and"
        " .tridockignore ignore",
    )


def test_every_rule_is_provoked_or_on_record() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert {rule.name for rule in RULES if rule.proof == "recorded"} == RECORDED.keys()
    assert {rule.name for rule in RULES if rule.proof == "provoked"} == PROVOKED.keys()


@pytest.mark.parametrize("place", sorted(set(PROVOKED.values())))
def test_the_tests_that_provoke_them_name_them(place: str) -> None:
    text = (ROOT / "tests" / place).read_text()
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    named = {word for constant in constants if isinstance(constant, str) for word in constant.split()}
    assert {name for name, where in PROVOKED.items() if where == place} <= named


def test_ssh_to_nobody() -> None:
    arguments = ["ssh", "-F", "/dev/null", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    for where in (["tridock-none.invalid"], ["-p", "1", "127.0.0.1"]):
        done = subprocess.run([*arguments, *where, "true"], capture_output=True, text=True, check=False)
        assert done.returncode == 255
        found = diagnose(launched(f"starting\nb: {done.stderr}"))
        assert found.rule == "ssh-unreachable"
        assert found.seen == f"b: {done.stderr.strip()} (logs/launcher.log)"


def test_the_supervisor_knows_the_first_rank_better_than_torchruns_summaries() -> None:
    assert diagnose(RECORDED["torchrun-root-cause"]).cause == "rank 1 ended first, with exit code -9 (SIGKILL)"
    exited = replace(seen(Cause.RANK_EXITED, "exited with code 1"), launcher=TORCHRUN)
    assert diagnose(exited).rule == "program-failed"
    raised = replace(
        RECORDED["torchrun-root-cause"], launcher=TORCHRUN.replace("-9 (pid: 183)  (SIGKILL)", "1 (pid: 183) ")
    )
    assert diagnose(raised).cause == "rank 1 ended first, with exit code 1"
    # Where only torchrun saw how it ended, its summary has more to say.
    gone = replace(seen(Cause.RANK_GONE, "was the first to end"), launcher=TORCHRUN)
    assert diagnose(gone).rule == "torchrun-root-cause"
    assert diagnose(replace(gone, launcher="")).rule == "program-failed"


def test_a_program_that_failed_is_explained_by_its_exception() -> None:
    event = {
        "event": "rank_died",
        "cause": Cause.RANK_EXITED,
        "rank": 1,
        "node": "b",
        "reason": "exited with code 1",
    }
    raised = "Traceback (most recent call last):\n  File x\nmy.BadError: no more\n"
    answers = {"a": Evidence(events=json.dumps(event), plan={"ranks": [{"rank": 1, "node": "b"}]}, printed={1: raised})}
    facts = facts_of(answers, "a", 4)
    assert (facts.reason, facts.has_log) == ("my.BadError: no more", False)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"event": "rank_died", "cause": Cause.RANK_EXITED, "rank": 1, "wait_status": 1 << 8}, "my.BadError: no more"),
        ({"event": "node_failed", "cause": Cause.PROGRAM_FAILED}, "my.BadError: no more"),
        ({"event": "rank_died", "cause": Cause.RANK_EXITED, "rank": 1, "wait_status": 3 << 8}, "ended"),
    ],
)
def test_of_a_rank_without_a_log_the_first_exception_of_its_node_counts(about: dict[str, object], said: str) -> None:
    lines = ["Traceback (most recent call last):", "  File x", "my.BadError: no more"]
    own, footer, other = (
        "".join(f"{node}: {line}\n" for line in [*lines[:2], last])
        for node, last in (("b", lines[2]), ("b", "starter.Error: a rank has failed"), ("a", "OSError: lost b"))
    )
    event = json.dumps({**about, "node": "b", "reason": "ended"})
    plan = {"ranks": [{"rank": 1, "node": "b"}]}
    facts = facts_of({"a": Evidence(events=event, plan=plan, launcher=f"{other}{own}{footer}")}, "a", 4)
    assert facts.reason == said


def test_nothing_is_known() -> None:
    assert diagnose(Facts(4)).rule == "unknown"
    assert diagnose(failed("ValueError('a bug')")).rule == "unknown"


def test_a_message_of_ours_says_what_to_do_itself() -> None:
    """Even if its text matches another rule."""
    reason = "/w/ds_config.json: cannot be read; got No such file or directory; start the run with `tridock launch`"
    problem = {
        "where": "/w/ds_config.json", "what": "cannot be read", "got": "No such file or directory",
        "todo": "start the run with `tridock launch`",
    }  # fmt: skip
    assert diagnose(failed(reason, cause=Cause.REFUSED, problem=problem)) == Diagnosis(
        OWN_MESSAGE,
        "/w/ds_config.json: cannot be read (got No such file or directory)",
        "start the run with `tridock launch`",
    )


def test_the_ranks_own_reason_comes_before_its_log_and_that_before_the_launchers() -> None:
    cuda, full = "CUDA out of memory", "OSError: [Errno 28] No space left on device"
    facts = failed("RuntimeError('boom')")
    assert diagnose(Facts(4, facts.failure, cuda, full, "")).rule == "cuda-out-of-memory"
    found = diagnose(Facts(4, facts.failure, facts.reason, f"one\n  {full}\nthree", cuda))
    assert (found.rule, found.seen) == ("disk-full", f"{full} (logs/rank-1.log)")
    assert diagnose(Facts(4, facts.failure, facts.reason, "", f"x\n{cuda}")).seen == f"{cuda} (logs/launcher.log)"


PLAN = {
    "ranks": [{"rank": 0, "node": "a", "pp": 0}, {"rank": 1, "node": "b", "pp": 1}],
    "memory": {
        "gpu": None,
        "limit_gib": None,
        "stages": [
            {"stage": 0, "terms": [], "total_bytes": 1},
            {"stage": 1, "terms": [{"name": "weights", "bytes": 5 << 20}], "total_bytes": 6 << 20},
        ],
    },
}


def test_the_planners_numbers_are_those_of_the_ranks_stage() -> None:
    failure = {"event": "run_failed", "rank": 1, "reason": "MemoryError()", "time": "2026-01-02T03:04:05.678+00:00"}
    metrics = [{"iteration": number, "loss": 3.0 - number} for number in range(7)] + [{"iteration": 7, "loss": None}]
    answers = {
        "a": Evidence(plan=PLAN, metrics=tuple(metrics)),
        "b": Evidence(events=f"{json.dumps(failure)}\n", kernel=("Out of memory",)),
    }
    facts = facts_of(answers, "a", 4)
    assert report(facts, diagnose(facts)) == (
        "  first    rank 1 on b, 2026-01-02 03:04:05 UTC\n"
        "  error    MemoryError()\n"
        "  steps    3: 0.0000, 4: -1.0000, 5: -2.0000, 6: -3.0000, 7: not finite\n"
        "  cause    b ran out of memory; the plan expects 6.0 MiB for a rank of stage 1 (weights 5.0 MiB); "
        "the kernel logged: Out of memory\n"
        "  remedy   give the container or the host more memory, start fewer ranks there, or lower "
        "batch.micro_batch_size\n"
        "  rule     host-out-of-memory (docs/triage.md)"
    )


def test_no_answer_at_all() -> None:
    facts = facts_of({}, "a", None)
    assert report(facts, diagnose(facts)) == (
        "  first    the launcher\n"
        "  steps    none was logged\n"
        "  cause    no rule matches this failure\n"
        "  remedy   read the end of the failed rank's log and of logs/launcher.log\n"
        "  rule     unknown (docs/triage.md)"
    )


@pytest.mark.parametrize("reason", ["the loss is not finite", "was killed by the kernel, out of memory", "hangs"])
def test_tridocks_own_text_tells_nothing_without_its_cause_code(reason: str) -> None:
    for facts in (failed(reason), failed(reason, Event.RANK_HUNG), launched(reason)):
        assert diagnose(facts).rule == "unknown"


def test_every_code_that_a_rule_is_about_finds_it() -> None:
    for rule in RULES:
        for cause in rule.causes:
            assert diagnose(seen(cause, "whatever it says")).rule == rule.name


def test_the_value_in_an_error_of_tridocks_is_upstreams() -> None:
    problem = {"where": "rendezvous", "what": "the ranks did not meet", "got": "", "todo": "see the launcher's log"}
    for got, rule in (("no answer", "rendezvous"), ("Unable to find address for: eth7", "no-such-interface")):
        facts = failed("rendezvous: …", cause=Cause.RENDEZVOUS_FAILED, problem={**problem, "got": got})
        assert diagnose(facts).rule == rule


def test_a_terminal_obeys_nothing_of_a_log() -> None:
    facts = Facts(
        4, failed("x").failure, "\x1b[31mRuntimeError('x')\x07\nmore", "\x1b]0;evil\x07CUDA out of memory\r\n"
    )
    text = report(facts, diagnose(facts))
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", text) == []


@pytest.mark.parametrize(
    ("last_collectives", "text"),
    [
        ([], ""),
        ([{0: 7}], ""),
        ([{0: 7}, {1: 7}], ""),
        ([{0: 9}, {1: 7}], "rank 1 on b came to collective 7, the others to 9"),
    ],
)
def test_the_rank_that_the_others_wait_for(last_collectives: list[dict[int, int]], text: str) -> None:
    assert stuck_rank(last_collectives, {0: "a", 1: "b"}) == text
    facts = failed("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)")
    cause = diagnose(Facts(4, facts.failure, facts.reason, stuck=text, steps=(Step(1, 1.0),))).cause
    assert cause.endswith(text)


def test_docs_list_every_rule() -> None:
    spec = importlib.util.spec_from_file_location("triage_reference", ROOT / "tools" / "triage_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "triage.md").read_text()
    assert page == module.with_rules(page), "run make reference"


@pytest.mark.parametrize(
    ("cause", "rule"), [(Cause.PROGRAM_NOT_STARTED, "program-not-started"), (Cause.PROGRAM_FAILED, "program-failed")]
)
def test_a_program_that_cannot_start_explains_its_rank_and_a_rank_its_failed_program(cause: Cause, rule: str) -> None:
    failed = {"event": cause.event, "cause": cause, "node": "a", "reason": "whatever it says"}
    died = {"event": "rank_died", "cause": Cause.RANK_EXITED, "rank": 0, "node": "a", "reason": "exited with code 127"}
    answers = {"a": Evidence(events=f"{json.dumps(failed)}\n{json.dumps(died)}\n")}
    assert diagnose(facts_of(answers, "a", 4)).rule == rule


def test_a_lost_node_tells_more_than_the_rank_that_lost_it() -> None:
    died = {"event": "rank_died", "cause": Cause.RANK_EXITED, "rank": 0, "node": "a", "reason": "exited with code 1"}
    lost = {"event": "node_lost", "cause": Cause.NODE_SILENT, "node": "b", "reason": "has not answered for 20 s"}
    events = f"{json.dumps(died)}\n{json.dumps(lost)}\n"
    assert diagnose(facts_of({"a": Evidence(events=events)}, "a", 4)).rule == "node-lost"


def test_a_lock_of_the_builder_is_named_with_the_command_that_removes_it() -> None:
    path = "/home/user/.cache/torch_extensions/py311_cu128/my ext/lock"
    event = Facts(4, FirstFailure(2, "b", "waits", seen=True, event={"cause": Cause.BUILD_LOCKED, "path": path}))
    found = diagnose(event)
    assert found.rule == "build-locked"
    assert found.remedy.startswith(f"remove it on b if it is still there: rm -f -- '{path}'; ")
