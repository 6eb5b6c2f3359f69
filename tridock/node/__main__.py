"""``python -m tridock.node VERB``: prints its answer as JSON or plain text on stdout, and errors on stderr."""

import argparse
import signal
import sys
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.codec import SchemaMismatchError, encode
from tridock.errors import EXIT_INTERRUPTED, ClusterError, Problem, TridockError
from tridock.node import verbs


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
    except SchemaMismatchError as error:
        todo = "build the image again with tridock image, then run tridock up, or use the Tridock that began the run"
        what = "is from another version of Tridock than this node's"
        print(Problem("the request", what, str(error), todo), file=sys.stderr)
        return ClusterError.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tridock.node", description="Runs of this node.")
    commands = parser.add_subparsers(required=True, metavar="VERB")
    workspace = argparse.ArgumentParser(add_help=False)
    workspace.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("folder", type=Path)

    start = commands.add_parser("start", parents=[folder], help="start a run that outlives this session")
    start.add_argument("--again", action="store_true", help="restart an ended run from its newest checkpoint")
    start.add_argument(
        "--patience", type=float, default=0.0, help="seconds that a previous supervisor has to end (default: 0)"
    )
    start.add_argument("--secrets", action="store_true", help="read the run's secrets from stdin, as a JSON object")
    start.set_defaults(action=verbs.start)

    text = "remove the folder of a run, unless it was started or is queued; print whether it was"
    commands.add_parser("withdraw", parents=[folder], help=text).set_defaults(action=verbs.withdraw)

    enqueue = commands.add_parser(
        "enqueue", parents=[folder], help="start a run once its slots are free; print its place"
    )
    enqueue.add_argument("--secrets", action="store_true", help="read the run's secrets from stdin, as a JSON object")
    enqueue.set_defaults(action=verbs.enqueue)

    keep = commands.add_parser(
        "keep-secrets", parents=[folder], help="keep a run's secrets from stdin, on a node that sees the head's files"
    )
    keep.set_defaults(action=verbs.keep_secrets_of_a_successor)

    queue = commands.add_parser("queue", parents=[workspace], help="print the runs that wait for slots, as JSON")
    queue.set_defaults(action=verbs.queue)

    cancel = commands.add_parser("cancel", parents=[folder], help="remove a run from the queue")
    cancel.set_defaults(action=verbs.cancel)

    next_ = commands.add_parser(
        "start-next", parents=[workspace], help="start the runs of the queue whose slots are free"
    )
    next_.set_defaults(action=verbs.start_next)

    sinks = commands.add_parser("sinks", help="print which libraries and services of sinks are missing here, as JSON")
    sinks.add_argument("names", nargs="+", metavar="NAME", help="wandb, mlflow, tensorboard or notify")
    sinks.add_argument("--reach", action="append", default=[], metavar="URL", help="server to connect to; repeatable")
    sinks.add_argument("--login", action="store_true", help="also whether the user is logged in at W&B")
    text = "read addresses to notify from stdin, as a JSON object by variable"
    sinks.add_argument("--notify", action="store_true", help=text)
    sinks.set_defaults(action=verbs.sinks)

    ranks = commands.add_parser(
        "start-ranks", help="start the ranks of this node and wait for them", allow_abbrev=False
    )
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
    ranks.set_defaults(action=verbs.start_ranks)

    nodes = commands.add_parser("start-nodes", parents=[folder], help="run a script of a run on all its nodes")
    nodes.add_argument("script", help="file of the run's folder; {node_rank} stands for the node's rank")
    nodes.set_defaults(action=verbs.start_nodes)

    setup = commands.add_parser("set-up", parents=[folder], help="run a run's setup command on this node")
    setup.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    setup.set_defaults(action=verbs.set_up)

    devices = commands.add_parser("on-devices", help="run a program on some of this node's slots", allow_abbrev=False)
    devices.add_argument("slots", help="slot numbers, as in CUDA_VISIBLE_DEVICES; 'allocated' for what a job has")
    devices.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    devices.set_defaults(action=verbs.on_devices)

    code = commands.add_parser("place-code", parents=[folder], help="lay out a run's code; reads its index from stdin")
    text = "read the run's first files instead, a tar archive whose last file is the index, and write them too"
    code.add_argument("--files", action="store_true", help=text)
    code.set_defaults(action=verbs.place_code)

    follow = commands.add_parser(
        "follow", parents=[folder], help="print a run's output until it ends; exit with its code"
    )
    follow.add_argument("--offset", type=int, default=0, help="byte of the output to start from (default: 0)")
    follow.add_argument("--keepalive", action="store_true", help="print a keepalive byte every 5 s, for fab")
    follow.set_defaults(action=verbs.follow)

    update = commands.add_parser("run-update", parents=[folder], help="print what is new in a run's records, as JSON")
    update.add_argument("--offset", type=int, default=0, help="bytes of metrics.jsonl that are known (default: 0)")
    update.add_argument("--inode", type=int, default=0, help="its inode then (default: 0)")
    update.add_argument("--events", type=int, default=0, help="lines of events.jsonl that are known (default: 0)")
    update.set_defaults(action=verbs.run_update)

    processes = commands.add_parser("processes", help="print the processes of a run, or of all runs, as JSON")
    processes.add_argument("run_id", nargs="?")
    processes.set_defaults(action=verbs.processes)

    agent = commands.add_parser(
        "agent", parents=[folder], help="watch and end the ranks of a run on this node; reads orders from stdin"
    )
    agent.add_argument("node")
    agent.add_argument("--token", type=int, default=0, help="that of the supervisor's lease, if nodes vote on it")
    agent.set_defaults(action=verbs.agent)

    stop = commands.add_parser("stop", parents=[workspace], help="end the processes of a run")
    stop.add_argument("run_id")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default: 10)")
    stop.set_defaults(action=verbs.stop)

    spare = commands.add_parser(
        "spare-status", parents=[folder], help="print whether this node can replace a lost node of a run, as JSON"
    )
    spare.add_argument("--reserve", action="store_true", help="reserve the node for the run if it can")
    spare.set_defaults(action=verbs.spare_status)

    vote = commands.add_parser(
        "vote", parents=[folder], help="vote on who supervises a run; reads requests from stdin, a line of JSON each"
    )
    vote.add_argument("node")
    vote.set_defaults(action=verbs.vote)

    replica = commands.add_parser(
        "replica-status", parents=[folder], help="print what this node lacks of a checkpoint; reads its manifest"
    )
    replica.add_argument("--token", type=int, required=True, help="that of the supervisor's lease")
    replica.add_argument("--checkpoint", default="", metavar="NAME", help="the checkpoint's folder")
    replica.set_defaults(action=verbs.replica_status)

    receive = commands.add_parser(
        "receive-files", parents=[folder], help="unpack a tar archive from stdin into a folder"
    )
    receive.set_defaults(action=verbs.receive_files)

    save = commands.add_parser("save", parents=[folder], help="signal the ranks of a run on this node to save and end")
    save.add_argument(
        "--signal", type=int, default=int(signal.SIGUSR1), help="what the scheduler sent (default: SIGUSR1)"
    )
    save.add_argument("--patience", type=float, default=0.0, help="seconds to wait for the first rank (default: 0)")
    save.set_defaults(action=verbs.save)

    runs = commands.add_parser("runs", parents=[workspace], help="print the runs of this workspace as JSON")
    runs.set_defaults(action=verbs.runs)

    logs = commands.add_parser("rank-logs", parents=[workspace], help="print the logs of ranks of this node")
    logs.add_argument("run_id")
    logs.add_argument("ranks", nargs="+", type=int)
    logs.add_argument("--follow", action="store_true", help="continue until the run has ended on this node")
    logs.add_argument("--prefix", action="store_true", help="start each line with its rank")
    logs.set_defaults(action=verbs.rank_logs)

    evidence = commands.add_parser(
        "evidence", parents=[folder], help="print this node's evidence of a failed run as JSON"
    )
    evidence.set_defaults(action=verbs.evidence)

    preflight = commands.add_parser("preflight", help="print what a launch checks on this node, as JSON")
    preflight.add_argument("files", nargs="*", metavar="FILE", help="file that the run reads")
    preflight.add_argument("--read", action="append", default=[], metavar="FILE", help="JSON file to print; repeatable")
    preflight.add_argument("--load", metavar="FOLDER", help="checkpoint that the run loads")
    text = "folder of weights that the run starts from, and its format"
    preflight.add_argument("--weights", metavar="FORMAT:FOLDER", help=text)
    text = "tokenizer.json that the run needs, or another one; repeatable"
    preflight.add_argument("--tokenizer", dest="tokenizers", action="append", default=[], metavar="FILE", help=text)
    text = "Python package that the run needs; repeatable"
    preflight.add_argument("--package", dest="packages", action="append", default=[], metavar="NAME", help=text)
    preflight.add_argument("--multicast", action="store_true", help="also print whether the GPUs have CUDA multicast")
    text = "folder on NVMe that the run needs; repeatable"
    preflight.add_argument("--nvme", action="append", default=[], metavar="FOLDER", help=text)
    preflight.add_argument("--head", action="store_true", help="also print a free port and the image's manifest")
    preflight.add_argument("--port", type=int, help="with --head: require this port")
    preflight.set_defaults(action=verbs.preflight)

    report = commands.add_parser(
        "node-report", parents=[workspace], help="print devices, limits, space and code of this node as JSON"
    )
    report.add_argument("ssh_to", nargs="*", metavar="NODE", help="node to connect to over ssh")
    report.add_argument("--quick", action="store_true", help="only what every launch checks")
    report.set_defaults(action=verbs.node_report)

    probe = commands.add_parser("mesh-probe", help="connect all nodes with each other; print the results as JSON")
    probe.add_argument("token", help="random name of this probe")
    probe.add_argument("nodes", nargs="+", metavar="NODE=ADDRESS")
    probe.set_defaults(action=verbs.mesh_probe)

    respond = commands.add_parser(
        "mesh-respond", parents=[workspace], help="answer a mesh-probe in JSON lines until the caller disconnects"
    )
    respond.add_argument("token")
    respond.set_defaults(action=verbs.mesh_respond)

    key = commands.add_parser("host-key", help="print the fingerprint of this node's ssh host key as JSON")
    key.set_defaults(action=verbs.host_key)
    return parser


if __name__ == "__main__":
    sys.exit(main())
