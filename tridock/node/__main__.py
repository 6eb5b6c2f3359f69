"""``python -m tridock.node VERB``: prints its answer as JSON or plain text on stdout, and errors on stderr."""

import argparse
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tridock.contracts import run_folder
from tridock.contracts.codec import SchemaMismatchError, encode
from tridock.contracts.prerequisites import NEEDS
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


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _function(path: str) -> Callable[[argparse.Namespace], Any]:
    """Returns a function of a module in ``tridock.node`` as a verb; the module is imported when the verb is called."""

    def call(arguments: argparse.Namespace) -> Any:
        module, name = path.split(":")
        given = {name: value for name, value in vars(arguments).items() if name != "action"}
        return getattr(import_module(f"tridock.node.{module}"), name)(**given)

    return call


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tridock.node", description="Runs of this node.")
    commands = parser.add_subparsers(required=True, metavar="VERB")

    def verb(
        name: str, text: str, *parents: argparse.ArgumentParser, calls: str = "", **options: Any
    ) -> argparse.ArgumentParser:
        """Adds the verb of the function ``calls`` (``module:name``), or of the function in ``verbs`` with its name."""
        added = commands.add_parser(name, parents=list(parents), help=text, **options)
        added.set_defaults(action=_function(calls) if calls else getattr(verbs, name.replace("-", "_")))
        return added

    workspace = argparse.ArgumentParser(add_help=False)
    workspace.add_argument("--workspace", type=Path, default=Path(run_folder.WORKSPACE))
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("folder", type=Path)

    start = verb("start", "start a run that outlives this session", folder)
    start.add_argument("--again", action="store_true", help="restart an ended run from its newest checkpoint")
    start.add_argument(
        "--patience", type=float, default=0.0, help="seconds that a previous supervisor has to end (default: 0)"
    )
    start.add_argument("--secrets", action="store_true", help="read the run's secrets from stdin, as a JSON object")

    verb("withdraw", "remove the folder of a run, unless it was started or is queued; print whether it was", folder)

    enqueue = verb("enqueue", "start a run once its slots are free; print its place", folder)
    enqueue.add_argument("--secrets", action="store_true", help="read the run's secrets from stdin, as a JSON object")

    verb("keep-secrets", "keep a run's secrets from stdin, on a node that sees the head's files", folder)
    verb("queue", "print the runs that wait for slots, as JSON", workspace)
    verb("cancel", "remove a run from the queue", folder, calls="queue:cancel")
    verb("start-next", "start the runs of the queue whose slots are free", workspace, calls="queue:start_next")

    trackers = verb("trackers", "print which trackers cannot work here, and why, as JSON")
    trackers.add_argument("names", nargs="+", metavar="NAME", help="wandb, mlflow, tensorboard or notify")
    trackers.add_argument("--reach", action="append", default=[], metavar="URL", help="a server; repeatable")
    trackers.add_argument("--login", action="store_true", help="also whether the user is logged in at W&B")
    text = "read addresses to notify from stdin, as a JSON object by variable"
    trackers.add_argument("--notify", action="store_true", help=text)

    ranks = verb("start-ranks", "start the ranks of this node and wait for them", allow_abbrev=False)
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

    nodes = verb("start-nodes", "run a script of a run on all its nodes", folder, calls="node_starter:start_nodes")
    nodes.add_argument("script", help="file of the run's folder; {node_rank} stands for the node's rank")

    setup = verb("set-up", "run a run's setup command on this node", folder, calls="node_starter:set_up")
    setup.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")

    devices = verb("on-devices", "run a program on some of this node's slots", allow_abbrev=False)
    devices.add_argument("slots", help="slot numbers, as in CUDA_VISIBLE_DEVICES; 'allocated' for what a job has")
    devices.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")

    code = verb("place-code", "lay out a run's code; reads its index from stdin", folder)
    text = "read the run's first files instead, a tar archive whose last file is the index, and write them too"
    code.add_argument("--files", action="store_true", help=text)

    follow = verb("follow", "print a run's output until it ends; exit with its code", folder)
    follow.add_argument("--offset", type=int, default=0, help="byte of the output to start from (default: 0)")
    follow.add_argument(
        "--keepalive", action="store_true", help="double each NUL, print a keepalive every 5 s, for fab"
    )

    text = "print what is new in a run's records, as JSON"
    update = verb("run-update", text, folder, calls="agent.run_update:run_update")
    update.add_argument("--offset", type=int, default=0, help="bytes of metrics.jsonl that are known (default: 0)")
    update.add_argument("--inode", type=int, default=0, help="its inode then (default: 0)")
    update.add_argument("--events", type=int, default=0, help="lines of events.jsonl that are known (default: 0)")

    agent = verb("agent", "watch and end the ranks of a run on this node; reads orders from stdin", folder)
    agent.add_argument("node")

    stop = verb("stop", "end the processes of a run", workspace)
    stop.add_argument("run_id")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL (default: 10)")

    text = "print whether this node can replace a lost node of a run, as JSON"
    spare = verb("spare-status", text, folder, calls="supervisor.failover:spare_status")
    spare.add_argument("--reserve", action="store_true", help="reserve the node for the run if it can")

    text = "copy files of a checkpoint from other nodes; reads from stdin which, as JSON"
    verb("receive-checkpoint", text, folder, calls="delivery:receive_checkpoint")

    verb("receive-files", "unpack a tar archive from stdin into a folder", folder)

    save = verb("save", "signal the ranks of a run on this node to save and end", folder)
    save.add_argument(
        "--signal", type=int, default=int(signal.SIGUSR1), help="what the scheduler sent (default: SIGUSR1)"
    )
    save.add_argument("--patience", type=float, default=0.0, help="seconds to wait for the first rank (default: 0)")

    runs = verb("runs", "print the runs of this workspace as JSON", workspace)
    runs.add_argument("--sizes", action="store_true", help="also say what each takes on disk")

    remove = verb("remove", "remove runs that are over; print those that stay", workspace)
    remove.add_argument("run_ids", nargs="+")

    logs = verb("rank-logs", "print the logs of ranks of this node", workspace)
    logs.add_argument("run_id")
    logs.add_argument("ranks", nargs="+", type=int)
    logs.add_argument("--follow", action="store_true", help="continue until the run has ended on this node")
    logs.add_argument("--prefix", action="store_true", help="start each line with its rank")

    text = "print this node's evidence of a failed run as JSON"
    verb("evidence", text, folder, calls="agent.evidence:evidence")

    text = "print what a launch checks on this node, as JSON"
    preflight = verb("preflight", text, calls="probes.preflight:preflight")
    preflight.add_argument("files", nargs="*", metavar="FILE", help="file that the run reads")
    preflight.add_argument("--read", action="append", default=[], metavar="FILE", help="JSON file to print; repeatable")
    preflight.add_argument("--load", metavar="FOLDER", help="checkpoint that the run loads")
    text = "folder of weights that the run starts from, and its format"
    preflight.add_argument("--weights", metavar="FORMAT:FOLDER", help=text)
    text = "tokenizer.json that the run needs, or another one; repeatable"
    preflight.add_argument("--tokenizer", dest="tokenizers", action="append", default=[], metavar="FILE", help=text)
    text = "train.load, to print which tokenizers its weights go with"
    preflight.add_argument("--tokenizer-of", metavar="LOAD", help=text)
    text = "folder of the checkpoints to continue, to print the progress in the newest one"
    preflight.add_argument("--progress-of", metavar="FOLDER", help=text)
    text = "vocabulary of GPT-2, and then its merges, to print which tokenizer they are"
    preflight.add_argument("--gpt2-file", dest="gpt2_files", action="append", default=[], metavar="FILE", help=text)
    text = "Python package that the run needs; repeatable"
    preflight.add_argument("--package", dest="packages", action="append", default=[], metavar="NAME", help=text)
    text = "what else the run needs; repeatable"
    preflight.add_argument("--needs", action="append", default=[], choices=NEEDS, help=text)
    text = "variable that the run sets and that says where such a thing is; repeatable"
    preflight.add_argument("--rank-env", action="append", type=_pair, default=[], metavar="NAME=VALUE", help=text)
    preflight.add_argument("--multicast", action="store_true", help="also print whether the GPUs have CUDA multicast")
    text = "folder on NVMe that the run needs; repeatable"
    preflight.add_argument("--nvme", action="append", default=[], metavar="FOLDER", help=text)
    preflight.add_argument("--save", metavar="FOLDER", help="folder in which ranks save")
    text = "data set whose parts to print; repeatable"
    preflight.add_argument("--data", action="append", default=[], metavar="PREFIX", help=text)
    preflight.add_argument("--split", default="1,0,0", metavar="SHARES", help="their parts (default: 1,0,0)")
    preflight.add_argument("--v115", action="store_true", help="divide them as Megatron-LM v1.1.5 does")
    preflight.add_argument("--images", metavar="PREFIX", help="image arrays whose types and shapes to print")
    preflight.add_argument("--head", action="store_true", help="also print a free port and the image's manifest")
    preflight.add_argument("--port", type=int, help="with --head: require this port")

    text = "print devices, limits, space and code of this node as JSON"
    report = verb("node-report", text, workspace, calls="probes.node_report:node_report")
    report.add_argument("ssh_to", nargs="*", metavar="NODE", help="node to connect to over ssh")
    report.add_argument("--quick", action="store_true", help="only what every launch checks")

    probe = verb("mesh-probe", "connect all nodes with each other; print the results as JSON")
    probe.add_argument("token", help="random name of this probe")
    probe.add_argument("nodes", nargs="+", metavar="NODE=ADDRESS")

    text = "answer a mesh-probe in JSON lines until the caller disconnects"
    respond = verb("mesh-respond", text, workspace, calls="probes.ssh_mesh_probe:respond")
    respond.add_argument("token")

    text = "print the fingerprint of this node's ssh host key as JSON"
    verb("host-key", text, calls="probes.node_report:host_key")
    return parser


if __name__ == "__main__":
    sys.exit(main())
