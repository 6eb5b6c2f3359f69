"""A twin of three nodes that share no runs: each has a folder of its own, as hosts without a network disk have.

The soak and tests/integration/test_voted_takeover.py use it. A launch believes that all nodes of a twin see one folder,
so :func:`put_on_every_node` does what it does on separate hosts.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from tridock.contracts import run_folder, run_state

HEAD, OTHER, SPARE = NODES = ("node-1", "node-2", "node-3")
_POLL_S: Final = 0.02


def runs_of(project: Path, node: str) -> Path:
    """The folder of a node's runs on this machine."""
    return project / ("runs" if node == HEAD else f".tridock/runs-of-{node}")


def write_hostfile(project: Path, name: str) -> Path:
    """Writes the hostfile of such a twin, its settings and its Compose file; the third node is a spare."""
    hostfile = project / "hostfiles" / f"{name}.local"
    compose = yaml.safe_load((project / "docker-compose.yml").read_text())
    text = json.dumps(compose["services"][OTHER])
    for node in (OTHER, SPARE):
        runs = runs_of(project, node)
        compose["services"][node] = json.loads(
            text.replace(OTHER, node).replace("./runs:", f"./{runs.relative_to(project)}:")
        )
        runs.mkdir(parents=True, exist_ok=True)
    file = hostfile.with_name(f"{hostfile.name}.compose.yml")
    file.write_text(yaml.safe_dump(compose))
    settings = yaml.safe_load((project / "hostfiles" / "twin.yaml").read_text())
    settings |= {"name": name, "spares": [SPARE], "compose": {"file": str(file.relative_to(project))}}
    hostfile.with_name(f"{hostfile.name}.yaml").write_text(yaml.safe_dump(settings))
    hostfile.write_text("".join(f"{node} slots=1\n" for node in NODES))
    return hostfile


@contextmanager
def put_on_every_node(project: Path) -> Iterator[None]:
    """While a run is launched: its first files reach every node."""
    ended = threading.Event()
    known = {path.name for path in runs_of(project, HEAD).iterdir()}

    def copy() -> None:
        while not ended.wait(_POLL_S):
            for path in runs_of(project, HEAD).iterdir():
                if path.name not in known and (path / run_state.LOCK).exists():
                    known.add(path.name)
                    for node in (OTHER, SPARE):
                        ignored = shutil.ignore_patterns(".*", run_folder.EVENTS)
                        shutil.copytree(path, runs_of(project, node) / path.name, ignore=ignored)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
