"""The launcher of a run, and its log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.node.conftest import node, wait_until
from tridock.contracts import run_folder
from tridock.contracts.rotated_logs import COPY_BYTES, RANK_BYTES, earlier


@pytest.mark.parametrize(("plan", "most"), [({}, COPY_BYTES), ({"rank_logs": False}, RANK_BYTES)])
def test_its_log_is_rotated_while_it_writes(make_run: Callable[..., Path], plan: dict[str, bool], most: int) -> None:
    """Further where the ranks have no logs of their own."""
    folder = make_run(
        f'head -c {most} /dev/zero\nsleep 1\n[ ! -e "$FOLDER"/logs/launcher.log.1 ] || exit 9\necho end\n'
        'until [ -e "$FOLDER"/logs/launcher.log.1 ]; do sleep 0.05; done\necho later\n'
    )
    (folder / run_folder.PLAN).write_text(json.dumps({"layout": "", "ranks": [], **plan}))
    assert node("start", str(folder)).returncode == 0
    log = folder / run_folder.LAUNCHER_LOG
    wait_until(lambda: (folder / run_folder.EXIT_CODE).exists())
    assert (folder / run_folder.EXIT_CODE).read_text().strip() != "9"  # rotated too early
    assert earlier(log).read_bytes().endswith(b"\0end\n")
    lines = log.read_text().splitlines()  # the script may be quicker than the note
    assert [line.partition("; ")[0] for line in lines].count("tridock: earlier output is in launcher.log.1") == 1
    assert "later" in lines
