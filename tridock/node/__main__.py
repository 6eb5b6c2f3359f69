"""``python -m tridock.node VERB``: answers are JSON or plain text on standard output, refusals on standard error."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tridock import run_folder
from tridock.errors import EXIT_INTERRUPTED, Problem, RequestError, RunError, TridockError
from tridock.node import preflight, runs, state
from tridock.node.follow import follow
from tridock.node.processes import find_processes, stop_processes

_RECORD_S = 8.0


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
    start.set_defaults(action=_start)

    follow_ = verbs.add_parser("follow", help="print a run's output until it ends; exit with its code")
    follow_.add_argument("folder", type=Path)
    follow_.add_argument("--offset", type=int, default=0, help="bytes of the output to leave out (default 0)")
    follow_.set_defaults(action=lambda a: follow(a.folder, a.offset))

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
    return parser


def _start(arguments: argparse.Namespace) -> int:
    # Only here, as in watch: what every other verb would wait for.
    from tridock.node import supervisor

    supervisor.start(arguments.folder)
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from tridock.node.watch import watch
    from tridock.supervision import Supervision

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
    state.mark_stopped(folder)
    stopped, left = stop_processes(arguments.run_id, arguments.grace)
    state.wait_for_end(folder, _RECORD_S)
    print(json.dumps({"stopped": stopped, "left": left}))
    if left:
        todo = "look for processes in state D there; they go when their device or file system answers"
        raise RunError(Problem(arguments.run_id, "has processes that did not end", str(left), todo))
    return 0


def _require_run_id(text: str) -> None:
    if not run_folder.is_run_id(text):
        raise RequestError(Problem("run id", "has the wrong form", repr(text), "see fab status for the runs"))


def _runs(arguments: argparse.Namespace) -> int:
    print(json.dumps(runs.list_runs(arguments.workspace)))
    return 0


def _rank_logs(arguments: argparse.Namespace) -> int:
    from tridock.node.rank_logs import show

    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    return show(folder, arguments.ranks, follow=arguments.follow, prefix=arguments.prefix)


def _evidence(arguments: argparse.Namespace) -> int:
    # Only here: no other verb needs what it imports.
    from tridock.node.evidence import evidence

    print(json.dumps(evidence(arguments.folder)))
    return 0


def _preflight(arguments: argparse.Namespace) -> int:
    print(json.dumps(preflight.look(arguments.files, arguments.read, head=arguments.head, port=arguments.port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
