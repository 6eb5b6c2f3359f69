"""The verbs of ``python -m tridock.node``: each returns its answer, its exit code, or nothing.

Each imports its own modules: every request to a node starts a new interpreter, which should start fast.
"""

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tridock.contracts import environment, heartbeat, mesh_answers, node_answers, run_folder, run_state
from tridock.contracts.appends import printing_to_a_full_disk
from tridock.contracts.codec import encode
from tridock.contracts.devices import VISIBLE, rank_devices
from tridock.contracts.events import Cause, append_event
from tridock.contracts.sinks import Reachable, keep_secrets, remove_leftover_secrets
from tridock.errors import ClusterError, Problem, RequestError, RunError
from tridock.node.agent.processes import find_processes, stop_processes

_RECORD_S = 8.0
_POLL_S = 0.5


def start(arguments: argparse.Namespace) -> None:
    from tridock.node.supervisor import process

    remove_leftover_secrets()
    if arguments.secrets:
        keep_secrets(arguments.folder, json.load(sys.stdin))
    process.start(arguments.folder, again=arguments.again, patience_s=arguments.patience)


def withdraw(arguments: argparse.Namespace) -> node_answers.Withdrawal:
    from tridock.node.supervisor import process

    return node_answers.Withdrawal(process.withdraw(arguments.folder))


def enqueue(arguments: argparse.Namespace) -> node_answers.QueuedRun:
    from tridock.node.queue import enqueue

    remove_leftover_secrets()
    if arguments.secrets:
        keep_secrets(arguments.folder, json.load(sys.stdin))
    return enqueue(arguments.folder)


def keep_secrets_of_a_successor(arguments: argparse.Namespace) -> None:
    from tridock.contracts.lease import newest
    from tridock.contracts.supervision import Supervision

    secrets, queue = json.load(sys.stdin), arguments.folder.parent / run_folder.QUEUE
    text = run_folder.read_text(arguments.folder / run_folder.SUPERVISION)
    is_replica = bool(text) and os.environ.get(environment.NODE, "") in Supervision.from_json(text).replicas
    if is_replica or newest(arguments.folder) or any(queue.glob(f"*-{arguments.folder.name}.json")):
        keep_secrets(arguments.folder, secrets)


def queue(arguments: argparse.Namespace) -> list[node_answers.QueuedRun]:
    from tridock.node.queue import queue_of, start_next

    start_next(arguments.workspace)  # the process that should have started them may have been killed
    return queue_of(arguments.workspace)


def cancel(arguments: argparse.Namespace) -> None:
    from tridock.node.queue import cancel

    cancel(arguments.folder)


def start_next(arguments: argparse.Namespace) -> None:
    from tridock.node.queue import start_next

    start_next(arguments.workspace)


def sinks(arguments: argparse.Namespace) -> Reachable:
    from tridock.node.probes.services import reachable

    notify = json.load(sys.stdin) if arguments.notify else {}
    return reachable(arguments.names, arguments.reach, notify, asks_login=arguments.login)


def start_ranks(arguments: argparse.Namespace) -> int:
    from tridock.contracts.records import read_plan, slots_of
    from tridock.node.rank_starter import rank_environments, start_ranks

    if arguments.run is None:
        node_rank, slots = arguments.node_rank, [tuple(range(arguments.nproc_per_node))] * arguments.nnodes
    else:
        by_node, here = slots_of(read_plan(arguments.run)), os.environ.get(environment.NODE, "")
        if here not in by_node:
            todo = f"the run has {', '.join(by_node) or 'no plan'}"
            raise RequestError(Problem(environment.NODE, "is not a node of the run", repr(here), todo))
        node_rank, slots = list(by_node).index(here), list(by_node.values())
    environments = rank_environments(list(map(len, slots)), node_rank, arguments.master_addr, arguments.master_port)
    program = [arguments.program, *arguments.arguments]
    if arguments.no_python:
        return start_ranks(environments, program, arguments.grace, _record_failure)
    visible = {VISIBLE: ",".join(map(str, slots[node_rank]))}
    python = [sys.executable, "-u", *(["-m"] if arguments.module else [])]
    return start_ranks([env | visible for env in environments], [*python, *program], arguments.grace)


def _record_failure(rank: int, wait_status: int) -> None:
    """Records the failure of a program that records none itself: it may be gone before the node agent sees it."""
    from tridock.contracts.rank_status import RankStatus
    from tridock.node.supervisor.verdict import ending

    status = RankStatus(rank, heartbeat.OBSERVED, 0, 0, 0, 0.0, alive=False, wait_status=wait_status)
    _record(*ending(status), rank=rank)


def _record(cause: Cause, reason: str, **rank: int) -> None:
    if folder := os.environ.get(environment.RUN_FOLDER):
        node = os.environ.get(environment.NODE, "")
        append_event(Path(folder), cause.event, **rank, node=node, cause=cause, reason=reason)


def start_nodes(arguments: argparse.Namespace) -> int:
    from tridock.node.node_starter import start_nodes

    return start_nodes(arguments.folder, arguments.script)


def set_up(arguments: argparse.Namespace) -> int:
    from tridock.node.node_starter import set_up

    return set_up(arguments.folder, os.environ.get(environment.NODE, ""), arguments.command)


def on_devices(arguments: argparse.Namespace) -> None:
    if arguments.slots != "allocated":
        os.environ[VISIBLE] = arguments.slots
        os.environ |= rank_devices(os.environ)
    program, *_ = command = arguments.command
    try:
        os.execvp(program, command)  # noqa: S606 - the user's program
    except OSError as error:
        problem = Problem(program, "cannot be started", error.strerror or str(error), "install it in the image")
        _record(Cause.PROGRAM_NOT_STARTED, f"cannot start {program}: {problem.got}")
        raise RequestError(problem) from None


def place_code(arguments: argparse.Namespace) -> node_answers.PlacedCode | int:
    from tridock.node.agent.code import place_code, place_run

    if not arguments.files:
        return place_code(arguments.folder, sys.stdin.read())
    try:
        return place_run(arguments.folder, sys.stdin.buffer)
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        print(f"{arguments.folder}: {reason}" if reason else error, file=sys.stderr)
        return ClusterError.exit_code


def follow(arguments: argparse.Namespace) -> int:
    from tridock.node.logs import follow, follow_with_keepalive

    with printing_to_a_full_disk():
        return (follow_with_keepalive if arguments.keepalive else follow)(arguments.folder, arguments.offset)


def run_update(arguments: argparse.Namespace) -> node_answers.RunUpdate:
    from tridock.node.agent.run_update import run_update as update_of

    return update_of(arguments.folder, arguments.offset, arguments.inode, arguments.events)


def processes(arguments: argparse.Namespace) -> list[node_answers.Process]:
    if arguments.run_id is not None:
        _require_run_id(arguments.run_id)
    return find_processes(arguments.run_id)


def agent(arguments: argparse.Namespace) -> None:
    from tridock.contracts.supervision import Supervision
    from tridock.node.agent.node_agent import run_agent

    supervision = Supervision.from_json((arguments.folder / run_folder.SUPERVISION).read_text())
    if supervision.voters:
        from tridock.node.agent.voter import vote_of

        if (newer := vote_of(arguments.folder, arguments.node)).token > arguments.token:
            todo = "end this supervisor: it has lost the run"
            raise RequestError(Problem(arguments.node, f"is supervised from {newer.node} now", newer.holder, todo))
    ranks = supervision.ranks[arguments.node]
    on_head = arguments.node == supervision.head
    if run_agent(arguments.folder, arguments.node, ranks, on_head=on_head, observed=supervision.observed):
        from tridock.node.supervisor.takeover import stand_in

        stand_in(arguments.folder, arguments.node)


def stop(arguments: argparse.Namespace) -> None:
    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    run_state.mark_stopped(folder)
    answer = stop_processes(arguments.run_id, arguments.grace)
    run_state.wait_for_end(folder, _RECORD_S)
    print(encode(answer))
    if answer.remaining:
        todo = "look for processes in state D there; they end when their device or file system answers"
        raise RunError(Problem(arguments.run_id, "has processes that did not end", str(answer.remaining), todo))


def spare_status(arguments: argparse.Namespace) -> node_answers.SpareStatus:
    from tridock.node.supervisor.failover import spare_status

    return spare_status(arguments.folder, reserve=arguments.reserve)


def vote(arguments: argparse.Namespace) -> None:
    from tridock.node.agent.voter import answer_requests

    answer_requests(arguments.folder, arguments.node)


def replica_status(arguments: argparse.Namespace) -> node_answers.ReplicaStatus:
    from tridock.node.agent.replica import status

    return status(arguments.folder, arguments.token, arguments.checkpoint, sys.stdin.buffer.read())


def receive_files(arguments: argparse.Namespace) -> None:
    from tridock.node.agent.receive_files import receive_files

    receive_files(arguments.folder, sys.stdin.buffer)


def save(arguments: argparse.Namespace) -> node_answers.Signalled:
    from tridock.contracts.supervision import Supervision

    if Supervision.from_json((arguments.folder / run_folder.SUPERVISION).read_text()).observed:
        # The supervisor signals all nodes. A scheduler's SIGTERM reaches all processes of a job, the ranks included.
        if arguments.signal == signal.SIGUSR1:
            (arguments.folder / run_folder.SIGNALLED).touch()
        return node_answers.Signalled(0)
    deadline = time.monotonic() + arguments.patience
    while not (pids := _pids_of_ranks(arguments.folder)) and time.monotonic() < deadline:
        if (arguments.folder / run_folder.EXIT_CODE).exists():
            break
        time.sleep(_POLL_S)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    return node_answers.Signalled(len(pids))


def _pids_of_ranks(folder: Path) -> list[int]:
    alive = {process.pid for process in find_processes(folder.name)}
    beats = [heartbeat.read(folder, rank) for rank in heartbeat.ranks(folder)]
    # If nodes share the folder, a rank of another node may have the pid of a process of this node.
    return [b.pid for b in beats if b is not None and b.pid in alive and _start_ticks(b.pid) == b.start_ticks]


def _start_ticks(pid: int) -> int | None:
    try:
        return heartbeat.start_ticks(pid)
    except OSError:
        return None


def _require_run_id(text: str) -> None:
    if not run_folder.is_run_id(text):
        raise RequestError(Problem("run id", "has the wrong form", repr(text), "see tridock status for the runs"))


def runs(arguments: argparse.Namespace) -> list[node_answers.RunInfo]:
    from tridock.node.agent.runs import list_runs

    remove_leftover_secrets()
    return list_runs(arguments.workspace)


def rank_logs(arguments: argparse.Namespace) -> int:
    from tridock.node.logs import show_rank_logs

    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    return show_rank_logs(folder, arguments.ranks, follow=arguments.follow, prefix=arguments.prefix)


def evidence(arguments: argparse.Namespace) -> node_answers.Evidence:
    from tridock.node.agent.evidence import evidence

    return evidence(arguments.folder)


def preflight(arguments: argparse.Namespace) -> node_answers.PreflightAnswer:
    from tridock.node.probes.preflight import preflight

    names = ("load", "weights", "tokenizers", "packages", "multicast", "nvme", "head", "port")
    asked = {name: getattr(arguments, name) for name in names}
    return preflight(arguments.files, arguments.read, **asked)


def node_report(arguments: argparse.Namespace) -> node_answers.QuickReport:
    from tridock.node.probes.node_report import node_report

    return node_report(arguments.workspace, quick=arguments.quick, ssh_to=arguments.ssh_to)


def mesh_probe(arguments: argparse.Namespace) -> dict[str, mesh_answers.MeshAnswer]:
    from tridock.node.probes.ssh_mesh_probe import probe_mesh

    return probe_mesh(dict(node.split("=", 1) for node in arguments.nodes), arguments.token)


def mesh_respond(arguments: argparse.Namespace) -> int:
    from tridock.node.probes.mesh_responder import respond

    return respond(arguments.token, arguments.workspace)


def host_key(_: argparse.Namespace) -> node_answers.HostKey:
    from tridock.node.probes.node_report import host_key

    return host_key()
