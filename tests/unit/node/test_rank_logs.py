"""Logs of ranks, whole and as they grow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.unit.node.conftest import FINISHED, node, wait_until

MakeRun = Callable[..., Path]


def show(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return node("rank-logs", folder.name, *arguments, "--workspace", str(folder.parent.parent))


def write(folder: Path, rank: int, text: str) -> None:
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / f"rank-{rank}.log").open("a") as log:
        log.write(text)


def test_whole_logs(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    write(folder, 0, "one\ntwo")
    write(folder, 3, "three\n")
    assert show(folder, "0").stdout == "one\ntwo"
    assert show(folder, "0", "3", "--prefix").stdout == "rank 0: one\nrank 0: two\nrank 3: three\n"


def test_logs_that_are_not_there(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    done = show(folder, "1", "2")
    todo = "it may not have started, or on another node: see tridock status"
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [f"rank {rank}: has no log here; got {folder}/logs/rank-{rank}.log; {todo}" for rank in (1, 2)],
    )


def test_a_run_id_that_is_none(tmp_path: Path) -> None:
    done = node("rank-logs", "../../etc", "1", "--workspace", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        2,
        "run id: has the wrong form; got '../../etc'; see tridock status for the runs\n",
    )


def test_lines_of_several_ranks_as_they_come_until_the_run_ends(make_run: MakeRun) -> None:
    folder = make_run(f'while [ ! -e "$FOLDER/go" ]; do sleep 0.05; done; {FINISHED}')
    arguments = ["rank-logs", folder.name, "0", "1", "--follow", "--prefix", "--workspace", str(folder.parent.parent)]
    assert node("start", str(folder)).returncode == 0
    with subprocess.Popen([sys.executable, "-m", "tridock.node", *arguments], stdout=subprocess.PIPE) as follow:
        assert follow.stdout is not None
        write(folder, 1, "started\nhal")
        assert follow.stdout.readline() == b"rank 1: started\n"
        write(folder, 0, "here\n")
        assert follow.stdout.readline() == b"rank 0: here\n"
        write(folder, 1, "f\nlast")
        assert follow.stdout.readline() == b"rank 1: half\n"
        (folder / "go").touch()
        assert follow.stdout.read() == b"rank 1: last\n"
    assert follow.returncode == 0
    wait_until((folder / "exit_code").exists)
