"""``python -m tridock.node VERB``: answers are JSON or plain text on standard output, refusals on standard error."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from tridock.contracts import heartbeat, run_folder, run_state
from tridock.errors import EXIT_INTERRUPTED, Problem, RequestError, RunError, TridockError
from tridock.node.agent import runs
from tridock.node.agent.processes import find_processes, stop_processes
from tridock.node.logs.follow import follow, follow_with_beats
from tridock.node.probes import preflight

_RECORD_S = 8.0
_POLL_S = 0.5


def main() -> int:
    """Runs one verb; returns its exit code."""
    arguments = _parser().parse_args()
    try:
        code: int = arguments.action(arguments)
        return code
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tridock.node", description="Runs of this node.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    start = verbs.add_parser("start", help="start a run that goes on when this session ends")
    start.add_argument("folder", type=Path)
    start.add_argument("--again", action="store_true", help="one that has ended goes on from its newest checkpoint")
    start.add_argument(
        "--patience", type=float, default=0.0, help="seconds for a supervisor of before to end (default 0)"
    )
    start.set_defaults(action=_start)

    follow_ = verbs.add_parser("follow", help="print a run's output until it ends; exit with its code")
    follow_.add_argument("folder", type=Path)
    follow_.add_argument("--offset", type=int, default=0, help="bytes of the output to leave out (default 0)")
    follow_.add_argument("--beats", action="store_true", help="also say that it is still there, for fab")
    follow_.set_defaults(action=lambda a: (follow_with_beats if a.beats else follow)(a.folder, a.offset))

    processes = verbs.add_parser("processes", help="the processes of a run, or of all runs, as JSON")
    processes.add_argument("run_id", nargs="?")
    processes.set_defaults(action=_processes)

    watch_ = verbs.add_parser("watch", help="what the supervisor sees and does of a run on this node; orders on stdin")
    watch_.add_argument("folder", type=Path)
    watch_.add_argument("node")
    watch_.set_defaults(action=_watch)

    stop = verbs.add_parser("stop", help="end the processes of a run")
    stop.add_argument("run_id")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default 10)")
    stop.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    stop.set_defaults(action=_stop)

    ready = verbs.add_parser("ready", help="whether this node could take another's place in a run, as JSON")
    ready.add_argument("folder", type=Path)
    ready.add_argument("--claim", action="store_true", help="if it could: from now on it is that run's")
    ready.set_defaults(action=_ready)

    take_ = verbs.add_parser("take", help="write the files of a tar archive on standard input below a folder")
    take_.add_argument("folder", type=Path)
    take_.set_defaults(action=_take)

    save = verbs.add_parser("save", help="tell the ranks of a run on this node to save and leave")
    save.add_argument("folder", type=Path)
    save.add_argument("--patience", type=float, default=0.0, help="seconds to wait for the first rank (default 0)")
    save.set_defaults(action=_save)

    runs_ = verbs.add_parser("runs", help="the runs of this workspace, as JSON")
    runs_.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    runs_.set_defaults(action=_runs)

    logs = verbs.add_parser("rank-logs", help="print the logs of ranks of this node")
    logs.add_argument("run_id")
    logs.add_argument("ranks", nargs="+", type=int)
    logs.add_argument("--follow", action="store_true", help="go on until the run has ended here")
    logs.add_argument("--prefix", action="store_true", help="say with each line whose it is")
    logs.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    logs.set_defaults(action=_rank_logs)

    evidence_ = verbs.add_parser("evidence", help="what this node can tell of a run that failed, as JSON")
    evidence_.add_argument("folder", type=Path)
    evidence_.set_defaults(action=_evidence)

    preflight_ = verbs.add_parser("preflight", help="what a launch wants to know first, as JSON")
    preflight_.add_argument("files", nargs="*", metavar="FILE", help="a file that the run reads")
    preflight_.add_argument("--read", action="append", default=[], metavar="FILE", help="a JSON file to be shown")
    preflight_.add_argument("--head", action="store_true", help="also a free port, and what is in the image")
    preflight_.add_argument("--port", type=int, help="with --head: this port and no other")
    preflight_.set_defaults(action=_preflight)

    _add_doctors_verbs(verbs)
    return parser


def _add_doctors_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    look_ = verbs.add_parser("look", help="what this node says of itself, as JSON")
    look_.add_argument("visit", nargs="*", metavar="NODE", help="a node to greet over ssh")
    look_.add_argument("--quick", action="store_true", help="only what each launch asks")
    look_.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    look_.set_defaults(action=_look)

    meet = verbs.add_parser("meet", help="greet all nodes over ssh and let them look at each other, as JSON")
    meet.add_argument("token", help="a random name for this meeting")
    meet.add_argument("nodes", nargs="+", metavar="NODE=ADDRESS")
    meet.set_defaults(action=_meet)

    answer_ = verbs.add_parser("answer", help="the far side of a meeting: JSON lines until the caller goes")
    answer_.add_argument("token")
    answer_.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    answer_.set_defaults(action=_answer)

    key = verbs.add_parser("shown-key", help="the host key that this node's sshd shows, as JSON")
    key.set_defaults(action=_shown_key)


# The doctor's modules are loaded when they are asked for: the other verbs start sooner without them.


def _look(arguments: argparse.Namespace) -> int:
    from tridock.node.probes import node_report

    print(json.dumps(node_report.look(arguments.workspace, quick=arguments.quick, visit=arguments.visit)))
    return 0


def _meet(arguments: argparse.Namespace) -> int:
    from tridock.node.probes import ssh_mesh_probe

    addresses = dict(word.split("=", 1) for word in arguments.nodes)
    print(json.dumps(ssh_mesh_probe.meet(addresses, arguments.token)))
    return 0


def _answer(arguments: argparse.Namespace) -> int:
    from tridock.node.probes import mesh_responder

    return mesh_responder.answer(arguments.token, arguments.workspace)


def _shown_key(_: argparse.Namespace) -> int:
    from tridock.node.probes import node_report

    print(json.dumps({"key": node_report.shown_key()}))
    return 0


def _start(arguments: argparse.Namespace) -> int:
    # Only here, as in watch: what every other verb would wait for.
    from tridock.node.supervisor import process

    process.start(arguments.folder, again=arguments.again, patience_s=arguments.patience)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from tridock.contracts.supervision import Supervision
    from tridock.node.agent.node_agent import watch

    supervision = Supervision.from_json((arguments.folder / run_folder.SUPERVISION).read_text())
    return watch(arguments.folder, arguments.node, supervision.ranks[arguments.node])


def _processes(arguments: argparse.Namespace) -> int:
    if arguments.run_id is not None:
        _require_run_id(arguments.run_id)
    print(json.dumps([process.to_json() for process in find_processes(arguments.run_id)]))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    run_state.mark_stopped(folder)
    stopped, left = stop_processes(arguments.run_id, arguments.grace)
    run_state.wait_for_end(folder, _RECORD_S)
    print(json.dumps({"stopped": stopped, "left": left}))
    if left:
        todo = "look for processes in state D there; they go when their device or file system answers"
        raise RunError(Problem(arguments.run_id, "has processes that did not end", str(left), todo))
    return 0


def _ready(arguments: argparse.Namespace) -> int:
    from tridock.node.supervisor.failover import readiness

    print(json.dumps(readiness(arguments.folder, claim=arguments.claim)))
    return 0


def _take(arguments: argparse.Namespace) -> int:
    from tridock.node.agent.receive_files import take

    take(arguments.folder, sys.stdin.buffer)
    return 0


def _save(arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + arguments.patience
    while not (ranks := _ranks_here(arguments.folder)) and time.monotonic() < deadline:
        if (arguments.folder / run_folder.EXIT_CODE).exists():
            break
        time.sleep(_POLL_S)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    print(json.dumps({"told": len(ranks)}))
    return 0


def _ranks_here(folder: Path) -> list[int]:
    living = {process.pid for process in find_processes(folder.name)}
    beats = [heartbeat.read(folder, rank) for rank in heartbeat.ranks(folder)]
    # Of nodes that share the folder another's rank may have the number of a process here.
    return [b.pid for b in beats if b is not None and b.pid in living and _began(b.pid) == b.began]


def _began(pid: int) -> int | None:
    try:
        return heartbeat.began(pid)
    except OSError:
        return None


def _require_run_id(text: str) -> None:
    if not run_folder.is_run_id(text):
        raise RequestError(Problem("run id", "has the wrong form", repr(text), "see fab status for the runs"))


def _runs(arguments: argparse.Namespace) -> int:
    print(json.dumps(runs.list_runs(arguments.workspace)))
    return 0


def _rank_logs(arguments: argparse.Namespace) -> int:
    from tridock.node.logs.rank_logs import show

    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    return show(folder, arguments.ranks, follow=arguments.follow, prefix=arguments.prefix)


def _evidence(arguments: argparse.Namespace) -> int:
    # Only here: no other verb needs what it imports.
    from tridock.node.agent.evidence import evidence

    print(json.dumps(evidence(arguments.folder)))
    return 0


def _preflight(arguments: argparse.Namespace) -> int:
    print(json.dumps(preflight.look(arguments.files, arguments.read, head=arguments.head, port=arguments.port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
