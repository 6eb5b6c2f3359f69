"""``tridock watch``: runs as a live page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tridock.cli.options import RUNS, Commands, add_cluster, add_command, add_run, find_hostfile, open_session
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
    add_cluster(parser)
    add_run(parser, "run id, or run folder", RUNS, several=True)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")


def _watch(arguments: argparse.Namespace) -> int:
    """Serve a live page about runs on this machine's loopback: curves, ranks, phases, memory and events, and
    Prometheus metrics. Several runs share the charts. Nothing listens on the hosts. Ctrl-C
    stops the page; the runs continue.
    """
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


def _asks(arguments: argparse.Namespace) -> dict[str, Callable[[Any], RunUpdate]]:
    from tridock.ops.runs.watch import ask_folder, ask_head

    names: list[str | None] = [*arguments.run] or [None]
    asks: dict[str, Callable[[Any], RunUpdate]] = {}
    session = None
    for name in names:
        if name is not None and ("/" in name or Path(name).is_dir() or find_hostfile(arguments) is None):
            folder = Path(name)
            asks[folder.absolute().name] = ask_folder(folder)
            continue
        from tridock.ops.runs.registry import choose_run

        session = session or open_session(arguments)
        run = choose_run(session, name, active=False)
        asks[run.run_id] = ask_head(session, run)
    return asks
