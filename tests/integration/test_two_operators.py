"""Two `tridock up` at the same moment, of one operator and of two, leave one cluster that works."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.rack import CLUSTER, PROGRAMS, Rack, Up
from tests.integration.support import execute

pytestmark = pytest.mark.timeout(600)

NODE = f"tridock-{CLUSTER}"
HOSTS = ("host-a", "host-b")


def up_at_once(rack: Rack, *projects: Path) -> None:
    """Runs `fab up` in every project at once, on hosts without nodes."""
    assert rack.fab("down").returncode == 0

    def up(project: Path) -> None:
        environment = rack.environment(PYTHONPATH=str(project), XDG_CACHE_HOME=f"{project}/cache")
        done = execute(str(PROGRAMS / "fab"), "up", "--hosts", f"hostfiles/{CLUSTER}", cwd=project, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("2 nodes up, image ")

    with ThreadPoolExecutor() as pool:
        list(pool.map(up, projects))
    assert [host.containers() for host in rack] == [{NODE: "running"}] * 2
    for source in HOSTS:
        for target in HOSTS:
            assert rack.node(source, "ssh", target, "echo $TRIDOCK_NODE") == f"{target}\n"


def test_one_operator_twice(rack_up: Up) -> None:
    rack = rack_up.rack
    up_at_once(rack, rack.project, rack.project, rack.project)


def test_two_operators_with_keys_of_their_own(rack_up: Up) -> None:
    rack = rack_up.rack
    other = rack.folder / "other"
    shutil.copytree(rack.project, other, ignore=shutil.ignore_patterns(".tridock", "cache"))
    try:
        for _ in range(3):
            up_at_once(rack, rack.project, other)
    finally:
        shutil.rmtree(other)
        assert rack.fab("up").returncode == 0  # the keys of the rack's own project again
