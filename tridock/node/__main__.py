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
from tridock.node.logs import follow, follow_with_keepalive
from tridock.node.probes.preflight import preflight

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

    start = verbs.add_parser("start", help="start a run that outlives this session")
    start.add_argument("folder", type=Path)
    start.add_argument("--again", action="store_true", help="restart an ended run from its newest checkpoint")
    start.add_argument(
        "--patience", type=float, default=0.0, help="seconds that a previous supervisor has to end (default: 0)"
    )
    start.set_defaults(action=_start)

    follow_ = verbs.add_parser("follow", help="print a run's output until it ends; exit with its code")
    follow_.add_argument("folder", type=Path)
    follow_.add_argument("--offset", type=int, default=0, help="bytes of the output to leave out (default 0)")
    follow_.add_argument("--keepalive", action="store_true", help="also print a keepalive byte every 5 s, for fab")
    follow_.set_defaults(action=lambda a: (follow_with_keepalive if a.keepalive else follow)(a.folder, a.offset))

    processes = verbs.add_parser("processes", help="the processes of a run, or of all runs, as JSON")
    processes.add_argument("run_id", nargs="?")
    processes.set_defaults(action=_processes)

    agent = verbs.add_parser("agent", help="watch and end the ranks of a run on this node; orders on stdin")
    agent.add_argument("folder", type=Path)
    agent.add_argument("node")
    agent.set_defaults(action=_agent)

    stop = verbs.add_parser("stop", help="end the processes of a run")
    stop.add_argument("run_id")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default 10)")
    stop.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    stop.set_defaults(action=_stop)

    spare = verbs.add_parser("spare-status", help="whether this node can replace a lost one of a run, as JSON")
    spare.add_argument("folder", type=Path)
    spare.add_argument("--reserve", action="store_true", help="reserve the node for the run if it can")
    spare.set_defaults(action=_spare_status)

    receive = verbs.add_parser("receive-files", help="write the files of a tar archive on stdin below a folder")
    receive.add_argument("folder", type=Path)
    receive.set_defaults(action=_receive_files)

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
    report = verbs.add_parser("node-report", help="devices, limits, space and code of this node, as JSON")
    report.add_argument("ssh_to", nargs="*", metavar="NODE", help="a node to connect to over ssh")
    report.add_argument("--quick", action="store_true", help="only what every launch checks")
    report.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    report.set_defaults(action=_node_report)

    probe = verbs.add_parser("mesh-probe", help="connect all nodes with each other, as JSON")
    probe.add_argument("token", help="a random name for this probe")
    probe.add_argument("nodes", nargs="+", metavar="NODE=ADDRESS")
    probe.set_defaults(action=_mesh_probe)

    respond = verbs.add_parser("mesh-respond", help="answer a mesh-probe: JSON lines until the caller disconnects")
    respond.add_argument("token")
    respond.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    respond.set_defaults(action=_mesh_respond)

    key = verbs.add_parser("host-key", help="the host key that this node's sshd presents, as JSON")
    key.set_defaults(action=_host_key)


# The doctor's modules are imported when they are needed: the other verbs start sooner without them.


def _node_report(arguments: argparse.Namespace) -> int:
    from tridock.node.probes.node_report import node_report

    print(json.dumps(node_report(arguments.workspace, quick=arguments.quick, ssh_to=arguments.ssh_to)))
    return 0


def _mesh_probe(arguments: argparse.Namespace) -> int:
    from tridock.node.probes.ssh_mesh_probe import probe_mesh

    print(json.dumps(probe_mesh(dict(node.split("=", 1) for node in arguments.nodes), arguments.token)))
    return 0


def _mesh_respond(arguments: argparse.Namespace) -> int:
    from tridock.node.probes.mesh_responder import respond

    return respond(arguments.token, arguments.workspace)


def _host_key(_: argparse.Namespace) -> int:
    from tridock.node.probes.node_report import host_key

    print(json.dumps({"key": host_key()}))
    return 0


def _start(arguments: argparse.Namespace) -> int:
    # Only here, as in watch: what every other verb would wait for.
    from tridock.node.supervisor import process

    process.start(arguments.folder, again=arguments.again, patience_s=arguments.patience)
    return 0


def _agent(arguments: argparse.Namespace) -> int:
    from tridock.contracts.supervision import Supervision
    from tridock.node.agent.node_agent import run_agent

    supervision = Supervision.from_json((arguments.folder / run_folder.SUPERVISION).read_text())
    return run_agent(arguments.folder, arguments.node, supervision.ranks[arguments.node])


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


def _spare_status(arguments: argparse.Namespace) -> int:
    from tridock.node.supervisor.failover import spare_status

    print(json.dumps(spare_status(arguments.folder, reserve=arguments.reserve)))
    return 0


def _receive_files(arguments: argparse.Namespace) -> int:
    from tridock.node.agent.receive_files import receive_files

    receive_files(arguments.folder, sys.stdin.buffer)
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
    # Where nodes share the folder, a rank of another node may have the pid of a process here.
    return [b.pid for b in beats if b is not None and b.pid in living and _start_ticks(b.pid) == b.start_ticks]


def _start_ticks(pid: int) -> int | None:
    try:
        return heartbeat.start_ticks(pid)
    except OSError:
        return None


def _require_run_id(text: str) -> None:
    if not run_folder.is_run_id(text):
        raise RequestError(Problem("run id", "has the wrong form", repr(text), "see fab status for the runs"))


def _runs(arguments: argparse.Namespace) -> int:
    print(json.dumps(runs.list_runs(arguments.workspace)))
    return 0


def _rank_logs(arguments: argparse.Namespace) -> int:
    from tridock.node.logs import show_rank_logs

    _require_run_id(arguments.run_id)
    folder = arguments.workspace / "runs" / arguments.run_id
    return show_rank_logs(folder, arguments.ranks, follow=arguments.follow, prefix=arguments.prefix)


def _evidence(arguments: argparse.Namespace) -> int:
    # Only here: no other verb needs what it imports.
    from tridock.node.agent.evidence import evidence

    print(json.dumps(evidence(arguments.folder)))
    return 0


def _preflight(arguments: argparse.Namespace) -> int:
    print(json.dumps(preflight(arguments.files, arguments.read, head=arguments.head, port=arguments.port)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
