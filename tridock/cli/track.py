"""``tridock track``: runs and Megatron logs to trackers."""

from __future__ import annotations

import argparse
from pathlib import Path

from tridock.cli.options import Commands, add_command
from tridock.errors import Problem, RequestError

_NAMES = ("wandb", "mlflow", "tensorboard")


def add(commands: Commands) -> None:
    examples = (
        "runs/demo-3d-20261122-110613-14b7 --tracker wandb",
        "runs/demo-3d-20261122-110613-14b7 --tracker mlflow --address http://tracking.example:5000 --project gpt",
        "--log pretrain.log --tracker tensorboard --address tensorboard",
    )
    summary = "send runs or Megatron logs to W&B, MLflow or TensorBoard"
    parser = add_command(commands, "track", _track, summary, *examples)
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="run folder: runs/<run-id>")
    text = "Megatron-LM log; repeatable"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=text)
    text = "tracker to send to; repeatable (default: the trackers of the run's experiment)"
    parser.add_argument("--tracker", action="append", default=[], choices=_NAMES, help=text)
    text = "W&B project or MLflow experiment (default: from the run, or tridock)"
    parser.add_argument("--project", metavar="NAME", help=text)
    parser.add_argument("--entity", metavar="NAME", help="W&B user or team")
    text = "server URL; for mlflow and tensorboard also a folder (default: from the run, or the library's)"
    parser.add_argument("--address", metavar="URL", help=text)
    text = "write everything to the run folder; contact no server"
    parser.add_argument("--offline", action="store_true", help=text)


def _track(arguments: argparse.Namespace) -> int:
    """Send runs to trackers: metrics, settings and the report page. Nothing is sent twice. A run
    that is active on this machine is followed to its end.
    """
    from tridock.ops.runs.track import track
    from tridock.report.log_records import write_log_folders

    if not arguments.run and not arguments.log:
        raise RequestError(Problem("RUN", "is missing", "", "give runs/<run-id>, or a Megatron log with --log"))
    options = {name: getattr(arguments, name) for name in ("project", "entity", "address")}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {"offline": True} if arguments.offline else {}
    logs = [folder for log in arguments.log for folder in write_log_folders(log, Path("runs"))]
    return track([*arguments.run, *logs], arguments.tracker, options)
