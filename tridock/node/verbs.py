"""The verbs of ``python -m tridock.node`` that are no function elsewhere: each returns its answer, its exit code, or
nothing.

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
from tridock.contracts import trackers as contract
from tridock.contracts.appends import printing_to_a_full_disk
from tridock.contracts.codec import encode
from tridock.contracts.devices import VISIBLE, rank_devices
from tridock.contracts.events import Cause, append_event
from tridock.contracts.trackers import Reachable, remove_leftover_secrets
from tridock.errors import ClusterError, Problem, RequestError, RunError
from tridock.node.agent.processes import find_processes, stop_processes
from tridock.node.program_output import run_program

_RECORD_S = 8.0
_POLL_S = 0.5


def start(arguments: argparse.Namespace) -> None:
    from tridock.node.supervisor import process

    _take_secrets(arguments)
    process.start(arguments.folder, again=arguments.again, patience_s=arguments.patience)


def withdraw(arguments: argparse.Namespace) -> node_answers.Withdrawal:
    from tridock.node.supervisor import process

    return node_answers.Withdrawal(process.withdraw(arguments.folder))


def enqueue(arguments: argparse.Namespace) -> node_answers.QueuedRun:
    from tridock.node.queue import enqueue

    _take_secrets(arguments)
    return enqueue(arguments.folder)


def _take_secrets(arguments: argparse.Namespace) -> None:
    remove_leftover_secrets()
    if arguments.secrets:
        contract.keep_secrets(arguments.folder, json.load(sys.stdin))


def keep_secrets(arguments: argparse.Namespace) -> None:
    from tridock.contracts.lease import newest

    secrets, queue = json.load(sys.stdin), arguments.folder.parent / run_folder.QUEUE
    if newest(arguments.folder) or any(queue.glob(f"*-{arguments.folder.name}.json")):
        contract.keep_secrets(arguments.folder, secrets)


def queue(arguments: argparse.Namespace) -> list[node_answers.QueuedRun]:
    from tridock.node.queue import queue_of, start_next

    start_next(arguments.workspace)  # the process that should have started them may have been killed
    return queue_of(arguments.workspace)


def trackers(arguments: argparse.Namespace) -> Reachable:
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


def on_devices(arguments: argparse.Namespace) -> int:
    if arguments.slots != "allocated":
        os.environ[VISIBLE] = arguments.slots
        os.environ |= rank_devices(os.environ)
    program, *_ = arguments.command
    try:
        return run_program(arguments.command)
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


def agent(arguments: argparse.Namespace) -> None:
    from tridock.node.agent.node_agent import NodeAgent

    if NodeAgent(arguments.folder, arguments.node).run():
        from tridock.node.supervisor.process import stand_in

        stand_in(arguments.folder, arguments.node)


def stop(arguments: argparse.Namespace) -> None:
    folder = _run_folder(arguments.workspace, arguments.run_id)
    run_state.mark_stopped(folder)
    answer = stop_processes(arguments.run_id, arguments.grace)
    run_state.wait_for_end(folder, _RECORD_S)
    print(encode(answer))
    if answer.remaining:
        todo = "look for processes in state D there; they end when their device or file system answers"
        raise RunError(Problem(arguments.run_id, "has processes that did not end", str(answer.remaining), todo))


def receive_files(arguments: argparse.Namespace) -> None:
    from tridock.node.agent.code import receive_files

    receive_files(arguments.folder, sys.stdin.buffer)


def save(arguments: argparse.Namespace) -> node_answers.Signalled:
    from tridock.contracts.supervision import Supervision

    if Supervision.read(arguments.folder).observed:
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


def _run_folder(workspace: Path, run_id: str) -> Path:
    if not run_folder.is_run_id(run_id):
        raise RequestError(Problem("run id", "has the wrong form", repr(run_id), "see tridock status for the runs"))
    return workspace / "runs" / run_id


def runs(arguments: argparse.Namespace) -> list[node_answers.RunInfo]:
    from tridock.node.agent.runs import list_runs

    remove_leftover_secrets()
    return list_runs(arguments.workspace, sizes=arguments.sizes)


def remove(arguments: argparse.Namespace) -> node_answers.Removal:
    from tridock.node.supervisor import process

    folders = [_run_folder(arguments.workspace, run_id) for run_id in arguments.run_ids]
    return node_answers.Removal(tuple(it.name for it in folders if process.withdraw(it, ended=True)))


def rank_logs(arguments: argparse.Namespace) -> int:
    from tridock.node.logs import show_rank_logs

    folder = _run_folder(arguments.workspace, arguments.run_id)
    return show_rank_logs(folder, arguments.ranks, follow=arguments.follow, prefix=arguments.prefix)


def mesh_probe(arguments: argparse.Namespace) -> dict[str, mesh_answers.MeshAnswer]:
    from tridock.node.probes.ssh_mesh_probe import probe_mesh

    return probe_mesh(dict(node.split("=", 1) for node in arguments.nodes), arguments.token)
