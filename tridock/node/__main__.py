"""``python -m tridock.node VERB``: prints its answer as JSON or plain text on stdout, and errors on stderr."""

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tridock.contracts import environment, heartbeat, node_answers, run_folder, run_state
from tridock.contracts.codec import UnknownFormError, encode
from tridock.contracts.devices import VISIBLE, rank_devices
from tridock.contracts.events import Cause, append_event
from tridock.contracts.sinks import Reachable, keep_secrets, remove_leftover_secrets
from tridock.errors import EXIT_INTERRUPTED, ClusterError, Problem, RequestError, RunError, TridockError
from tridock.node.agent.processes import find_processes, stop_processes

_RECORD_S = 8.0
_POLL_S = 0.5


def main() -> int:
    """Runs one verb; returns its exit code."""
    arguments = _parser().parse_args()
    try:
        answer = arguments.action(arguments)
        if answer is None or isinstance(answer, int):
            return answer or 0
        print(encode(answer))
        return 0
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except UnknownFormError as error:
        todo = "build the image again with tridock image, then run tridock up, or use the Tridock that began the run"
        what = "is from another version of Tridock than this node's"
        print(Problem("the request", what, str(error), todo), file=sys.stderr)
        return ClusterError.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tridock.node", description="Runs of this node.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    workspace = argparse.ArgumentParser(add_help=False)
    workspace.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("folder", type=Path)

    start = verbs.add_parser("start", parents=[folder], help="start a run that outlives this session")
    start.add_argument("--again", action="store_true", help="restart an ended run from its newest checkpoint")
    start.add_argument(
        "--patience", type=float, default=0.0, help="seconds that a previous supervisor has to end (default: 0)"
    )
    start.add_argument("--secrets", action="store_true", help="read the run's secrets from stdin, as a JSON object")
    start.set_defaults(action=_start)

    enqueue = verbs.add_parser("enqueue", parents=[folder], help="start a run once its slots are free; print its place")
    enqueue.add_argument("--secrets", action="store_true", help="read the run's secrets from stdin, as a JSON object")
    enqueue.set_defaults(action=_enqueue)

    queue = verbs.add_parser("queue", parents=[workspace], help="print the runs that wait for slots, as JSON")
    queue.set_defaults(action=_queue)

    cancel = verbs.add_parser("cancel", parents=[folder], help="remove a run from the queue")
    cancel.set_defaults(action=_cancel)

    next_ = verbs.add_parser("start-next", parents=[workspace], help="start the runs of the queue whose slots are free")
    next_.set_defaults(action=_start_next)

    sinks = verbs.add_parser("sinks", help="print which libraries and services of sinks are missing here, as JSON")
    sinks.add_argument("names", nargs="+", metavar="NAME", help="wandb, mlflow, tensorboard or notify")
    sinks.add_argument("--reach", action="append", default=[], metavar="URL", help="server to connect to; repeatable")
    sinks.add_argument("--login", action="store_true", help="also whether the user is logged in at W&B")
    text = "read addresses to notify from stdin, as a JSON object by variable"
    sinks.add_argument("--notify", action="store_true", help=text)
    sinks.set_defaults(action=_sinks)

    ranks = verbs.add_parser("start-ranks", help="start the ranks of this node and wait for them", allow_abbrev=False)
    ranks.add_argument("--nnodes", type=int, default=1, help="number of nodes (default: 1)")
    ranks.add_argument("--node-rank", type=int, default=0, help="rank of this node (default: 0)")
    number = ranks.add_mutually_exclusive_group(required=True)
    number.add_argument("--nproc-per-node", type=int, help="ranks of each node")
    number.add_argument("--run", type=Path, metavar="FOLDER", help="run whose plan has the ranks of all nodes")
    ranks.add_argument("--master-addr", default="127.0.0.1", help="address of node 0 (default: 127.0.0.1)")
    ranks.add_argument("--master-port", type=int, required=True, help="port of rank 0")
    ranks.add_argument("--grace", type=float, default=30.0, help="seconds between SIGTERM and SIGKILL (default: 30)")
    kind = ranks.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module, as for python -m")
    kind.add_argument("--no-python", action="store_true", help="PROGRAM is not a Python file, but any program")
    ranks.add_argument("program", metavar="PROGRAM", help="what each rank runs in Python")
    ranks.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    ranks.set_defaults(action=_start_ranks)

    nodes = verbs.add_parser("start-nodes", parents=[folder], help="run a script of a run on all its nodes")
    nodes.add_argument("script", help="file of the run's folder; {node_rank} stands for the node's rank")
    nodes.set_defaults(action=_start_nodes)

    setup = verbs.add_parser("set-up", parents=[folder], help="run a run's setup command on this node")
    setup.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    setup.set_defaults(action=_set_up)

    devices = verbs.add_parser("on-devices", help="run a program on some of this node's slots", allow_abbrev=False)
    devices.add_argument("slots", help="slot numbers, as in CUDA_VISIBLE_DEVICES; 'allocated' for what a job has")
    devices.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    devices.set_defaults(action=_on_devices)

    code = verbs.add_parser("place-code", parents=[folder], help="lay out a run's code; reads its index from stdin")
    code.set_defaults(action=_place_code)

    follow = verbs.add_parser("follow", parents=[folder], help="print a run's output until it ends; exit with its code")
    follow.add_argument("--offset", type=int, default=0, help="byte of the output to start from (default: 0)")
    follow.add_argument("--keepalive", action="store_true", help="print a keepalive byte every 5 s, for fab")
    follow.set_defaults(action=_follow)

    news = verbs.add_parser("news", parents=[folder], help="print what is new in a run's records, as JSON")
    news.add_argument("--offset", type=int, default=0, help="bytes of metrics.jsonl that are known (default: 0)")
    news.add_argument("--inode", type=int, default=0, help="its inode then (default: 0)")
    news.add_argument("--events", type=int, default=0, help="lines of events.jsonl that are known (default: 0)")
    news.set_defaults(action=_news)

    processes = verbs.add_parser("processes", help="print the processes of a run, or of all runs, as JSON")
    processes.add_argument("run_id", nargs="?")
    processes.set_defaults(action=_processes)

    agent = verbs.add_parser(
        "agent", parents=[folder], help="watch and end the ranks of a run on this node; reads orders from stdin"
    )
    agent.add_argument("node")
    agent.set_defaults(action=_agent)

    stop = verbs.add_parser("stop", parents=[workspace], help="end the processes of a run")
    stop.add_argument("run_id")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default: 10)")
    stop.set_defaults(action=_stop)

    spare = verbs.add_parser(
        "spare-status", parents=[folder], help="print whether this node can replace a lost node of a run, as JSON"
    )
    spare.add_argument("--reserve", action="store_true", help="reserve the node for the run if it can")
    spare.set_defaults(action=_spare_status)

    receive = verbs.add_parser("receive-files", parents=[folder], help="unpack a tar archive from stdin into a folder")
    receive.set_defaults(action=_receive_files)

    save = verbs.add_parser("save", parents=[folder], help="signal the ranks of a run on this node to save and end")
    save.add_argument(
        "--signal", type=int, default=int(signal.SIGUSR1), help="what the scheduler sent (default: SIGUSR1)"
    )
    save.add_argument("--patience", type=float, default=0.0, help="seconds to wait for the first rank (default: 0)")
    save.set_defaults(action=_save)

    runs = verbs.add_parser("runs", parents=[workspace], help="print the runs of this workspace as JSON")
    runs.set_defaults(action=_runs)

    logs = verbs.add_parser("rank-logs", parents=[workspace], help="print the logs of ranks of this node")
    logs.add_argument("run_id")
    logs.add_argument("ranks", nargs="+", type=int)
    logs.add_argument("--follow", action="store_true", help="continue until the run has ended on this node")
    logs.add_argument("--prefix", action="store_true", help="start each line with its rank")
    logs.set_defaults(action=_rank_logs)

    evidence = verbs.add_parser("evidence", parents=[folder], help="print this node's evidence of a failed run as JSON")
    evidence.set_defaults(action=_evidence)

    preflight = verbs.add_parser("preflight", help="print what a launch checks on this node, as JSON")
    preflight.add_argument("files", nargs="*", metavar="FILE", help="file that the run reads")
    preflight.add_argument("--read", action="append", default=[], metavar="FILE", help="JSON file to print; repeatable")
    preflight.add_argument("--load", metavar="FOLDER", help="checkpoint that the run loads")
    text = "tokenizer.json that the run needs, or another one; repeatable"
    preflight.add_argument("--tokenizer", dest="tokenizers", action="append", default=[], metavar="FILE", help=text)
    preflight.add_argument("--head", action="store_true", help="also print a free port and the image's manifest")
    preflight.add_argument("--port", type=int, help="with --head: require this port")
    preflight.set_defaults(action=_preflight)

    report = verbs.add_parser(
        "node-report", parents=[workspace], help="print devices, limits, space and code of this node as JSON"
    )
    report.add_argument("ssh_to", nargs="*", metavar="NODE", help="node to connect to over ssh")
    report.add_argument("--quick", action="store_true", help="only what every launch checks")
    report.set_defaults(action=_node_report)

    probe = verbs.add_parser("mesh-probe", help="connect all nodes with each other; print the results as JSON")
    probe.add_argument("token", help="random name of this probe")
    probe.add_argument("nodes", nargs="+", metavar="NODE=ADDRESS")
    probe.set_defaults(action=_mesh_probe)

    respond = verbs.add_parser(
        "mesh-respond", parents=[workspace], help="answer a mesh-probe in JSON lines until the caller disconnects"
    )
    respond.add_argument("token")
    respond.set_defaults(action=_mesh_respond)

    key = verbs.add_parser("host-key", help="print the fingerprint of this node's ssh host key as JSON")
    key.set_defaults(action=_host_key)
    return parser


# Each verb imports its own modules: every request to a node starts a new interpreter, which should start fast.


def _start(arguments: argparse.Namespace) -> None:
    from tridock.node.supervisor import process

    remove_leftover_secrets()
    if arguments.secrets:
        keep_secrets(arguments.folder, json.load(sys.stdin))
    process.start(arguments.folder, again=arguments.again, patience_s=arguments.patience)


def _enqueue(arguments: argparse.Namespace) -> node_answers.QueuedRun:
    from tridock.node.queue import enqueue

    remove_leftover_secrets()
    if arguments.secrets:
        keep_secrets(arguments.folder, json.load(sys.stdin))
    return enqueue(arguments.folder)


def _queue(arguments: argparse.Namespace) -> list[node_answers.QueuedRun]:
    from tridock.node.queue import queue_of, start_next

    start_next(arguments.workspace)  # whoever should have may have been killed
    return queue_of(arguments.workspace)


def _cancel(arguments: argparse.Namespace) -> None:
    from tridock.node.queue import cancel

    cancel(arguments.folder)


def _start_next(arguments: argparse.Namespace) -> None:
    from tridock.node.queue import start_next

    start_next(arguments.workspace)


def _sinks(arguments: argparse.Namespace) -> Reachable:
    from tridock.node.probes.services import reachable

    notify = json.load(sys.stdin) if arguments.notify else {}
    return reachable(arguments.names, arguments.reach, notify, asks_login=arguments.login)


def _start_ranks(arguments: argparse.Namespace) -> int:
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
    """Of a program that records nothing itself: one that fails at once is gone before the node agent sees it."""
    from tridock.contracts.rank_status import RankStatus
    from tridock.node.supervisor.verdict import ending

    status = RankStatus(rank, heartbeat.OBSERVED, 0, 0, 0, 0.0, alive=False, wait_status=wait_status)
    _record(*ending(status), rank=rank)


def _record(cause: Cause, reason: str, **rank: int) -> None:
    if folder := os.environ.get(environment.RUN_FOLDER):
        node = os.environ.get(environment.NODE, "")
        append_event(Path(folder), cause.event, **rank, node=node, cause=cause, reason=reason)


def _start_nodes(arguments: argparse.Namespace) -> int:
    from tridock.node.node_starter import start_nodes

    return start_nodes(arguments.folder, arguments.script)


def _set_up(arguments: argparse.Namespace) -> int:
    from tridock.node.node_starter import set_up

    return set_up(arguments.folder, os.environ.get(environment.NODE, ""), arguments.command)


def _on_devices(arguments: argparse.Namespace) -> None:
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


def _place_code(arguments: argparse.Namespace) -> node_answers.PlacedCode:
    from tridock.node.agent.code import place_code

    return place_code(arguments.folder, sys.stdin.read())


def _follow(arguments: argparse.Namespace) -> int:
    from tridock.node.logs import follow, follow_with_keepalive

    return (follow_with_keepalive if arguments.keepalive else follow)(arguments.folder, arguments.offset)


def _news(arguments: argparse.Namespace) -> node_answers.RunNews:
    from tridock.node.agent.news import run_news

    return run_news(arguments.folder, arguments.offset, arguments.inode, arguments.events)


def _processes(arguments: argparse.Namespace) -> list[node_answers.Process]:
    if arguments.run_id is not None:
        _require_run_id(arguments.run_id)
    return find_processes(arguments.run_id)


def _agent(arguments: argparse.Namespace) -> None:
    from tridock.contracts.supervision import Supervision
    from tridock.node.agent.node_agent import run_agent

    supervision = Supervision.from_json((arguments.folder / run_folder.SUPERVISION).read_text())
    ranks = supervision.ranks[arguments.node]
    if run_agent(arguments.folder, arguments.node, ranks, observed=supervision.observed):
        from tridock.node.supervisor.takeover import stand_in

        stand_in(arguments.folder, arguments.node)


def _stop(arguments: argparse.Namespace) -> None:
    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    run_state.mark_stopped(folder)
    answer = stop_processes(arguments.run_id, arguments.grace)
    run_state.wait_for_end(folder, _RECORD_S)
    print(encode(answer))
    if answer.remaining:
        todo = "look for processes in state D there; they end when their device or file system answers"
        raise RunError(Problem(arguments.run_id, "has processes that did not end", str(answer.remaining), todo))


def _spare_status(arguments: argparse.Namespace) -> node_answers.SpareStatus:
    from tridock.node.supervisor.failover import spare_status

    return spare_status(arguments.folder, reserve=arguments.reserve)


def _receive_files(arguments: argparse.Namespace) -> None:
    from tridock.node.agent.receive_files import receive_files

    receive_files(arguments.folder, sys.stdin.buffer)


def _save(arguments: argparse.Namespace) -> node_answers.Signalled:
    from tridock.contracts.supervision import Supervision

    if Supervision.from_json((arguments.folder / run_folder.SUPERVISION).read_text()).observed:
        # The supervisor tells all nodes. SIGTERM is a scheduler's to all processes of a job: the ranks have it.
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


def _runs(arguments: argparse.Namespace) -> list[node_answers.RunInfo]:
    from tridock.node.agent.runs import list_runs

    remove_leftover_secrets()
    return list_runs(arguments.workspace)


def _rank_logs(arguments: argparse.Namespace) -> int:
    from tridock.node.logs import show_rank_logs

    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    return show_rank_logs(folder, arguments.ranks, follow=arguments.follow, prefix=arguments.prefix)


def _evidence(arguments: argparse.Namespace) -> node_answers.Evidence:
    from tridock.node.agent.evidence import evidence

    return evidence(arguments.folder)


def _preflight(arguments: argparse.Namespace) -> node_answers.PreflightAnswer:
    from tridock.node.probes.preflight import preflight

    asked = {name: getattr(arguments, name) for name in ("load", "tokenizers", "head", "port")}
    return preflight(arguments.files, arguments.read, **asked)


def _node_report(arguments: argparse.Namespace) -> node_answers.QuickReport:
    from tridock.node.probes.node_report import node_report

    return node_report(arguments.workspace, quick=arguments.quick, ssh_to=arguments.ssh_to)


def _mesh_probe(arguments: argparse.Namespace) -> dict[str, node_answers.MeshAnswer]:
    from tridock.node.probes.ssh_mesh_probe import probe_mesh

    return probe_mesh(dict(node.split("=", 1) for node in arguments.nodes), arguments.token)


def _mesh_respond(arguments: argparse.Namespace) -> int:
    from tridock.node.probes.mesh_responder import respond

    return respond(arguments.token, arguments.workspace)


def _host_key(_: argparse.Namespace) -> node_answers.HostKey:
    from tridock.node.probes.node_report import host_key

    return host_key()


if __name__ == "__main__":
    sys.exit(main())
