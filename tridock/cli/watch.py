"""``tridock watch`` and ``track``: runs as a live page, and in trackers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tridock.cli.options import RUNS, Arguments, Commands, add_command
from tridock.cli.output import say
from tridock.contracts import environment
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.contracts.node_answers import RunUpdate


def add(commands: Commands) -> None:
    examples = (
        "--hosts hostfile",
        "runs/demo-3d-20261122-110613-14b7 runs/demo-3d-20261122-120204-9c1e",
        "--hosts hostfile --port 8642",
    )
    parser = add_command(commands, "watch", _watch, "show runs live in your browser", *examples)
    parser.add_cluster()
    parser.add_run("run id, or run folder", RUNS, several=True)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")

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
    parser.add_flag("--offline", "write everything to the run folder; contact no server")
    parser.add_yes()


def _watch(arguments: Arguments) -> int:
    """Serve a live page about runs on this machine's loopback: curves, ranks, phases, memory and events, and
    Prometheus metrics. Several runs share the charts. Nothing listens on the hosts. Ctrl-C
    stops the page; the runs continue."""
    from tridock.report.live_server import LiveServer

    token = os.environ.get(environment.WATCH_TOKEN)
    if token is not None and (len(token) < 16 or not token.replace("-", "").replace("_", "").isalnum()):
        todo = "use at least 16 letters, digits, - and _"
        raise RequestError(Problem(environment.WATCH_TOKEN, "is not a valid token", f"{len(token)} characters", todo))
    with LiveServer(_asks(arguments), arguments.port, token) as server:
        server.watch()
        say(f"{', '.join(server.runs)}\npage        {server.url}\nmetrics     {server.url}metrics")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _asks(arguments: Arguments) -> dict[str, Callable[[Any], RunUpdate]]:
    from tridock.ops.runs.watch import ask_folder, ask_head

    names: list[str | None] = [*arguments.run] or [None]
    asks: dict[str, Callable[[Any], RunUpdate]] = {}
    client = None
    for name in names:
        if name is not None and ("/" in name or Path(name).is_dir() or arguments.found_hostfile is None):
            folder = Path(name)
            asks[folder.absolute().name] = ask_folder(folder)
            continue
        from tridock.ops.runs.cluster_runs import choose_run

        client = client or arguments.open_client()
        run = choose_run(client, name, active=False)
        asks[run.run_id] = ask_head(client, run)
    return asks


_NAMES = ("wandb", "mlflow", "tensorboard")


def _track(arguments: Arguments) -> int:
    """Send runs to trackers: metrics, settings and the report page. Nothing is sent twice. A run
    that is active on this machine is followed to its end."""
    from tridock.ops.runs.track import track
    from tridock.report.log_records import write_log_folders

    if not arguments.run and not arguments.log:
        raise RequestError(Problem("RUN", "is missing", "", "give runs/<run-id>, or a Megatron log with --log"))
    options = {name: getattr(arguments, name) for name in ("project", "entity", "address")}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {"offline": True} if arguments.offline else {}
    logs = [folder for log in arguments.log for folder in write_log_folders(log, Path("runs"))]
    return track([*arguments.run, *logs], arguments.tracker, options, arguments.confirm)
