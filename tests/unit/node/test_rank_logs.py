"""Logs of ranks, whole and as they grow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.node.conftest import FINISHED, node, wait_until
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.rotated_logs import rotate
from tridock.errors import ClusterError
from tridock.node.agent.evidence import evidence
from tridock.ops.runs.logs import LogStream
from tridock.remote.host import LocalHost

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


def test_a_log_in_two_parts_is_whole(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    write(folder, 0, "one\ntw")
    rotate(folder / "logs/rank-0.log", 1)
    write(folder, 0, "o\n")
    note = "tridock: earlier output is in rank-0.log.1; what is older is removed\n"
    assert show(folder, "0").stdout == f"one\ntw{note}o\n"
    (folder / run_folder.LAUNCHER_LOG).write_text("three\n")
    rotate(folder / run_folder.LAUNCHER_LOG, 1)
    (folder / run_folder.EXIT_CODE).write_text("0\n")
    found = evidence(folder)
    assert (found.logs[0], found.launcher.splitlines()[0]) == (f"one\ntw{note}o", "three")
    assert node("follow", str(folder)).stdout.splitlines()[0] == "three"


def test_output_for_a_remote_reader(make_run: MakeRun) -> None:
    folder = make_run("exit 0")
    (folder / "logs").mkdir()
    (folder / run_folder.LAUNCHER_LOG).write_bytes(b"one\4two\0+\0.")
    (folder / run_folder.EXIT_CODE).write_text("0\n")
    words = [sys.executable, "-m", "tridock.node", "follow", str(folder)]
    marked = subprocess.run([*words, "--keepalive"], capture_output=True, check=True).stdout
    assert marked == b"one\4two\0\0+\0\0." + run_folder.END
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"one\4two\0+\0."


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_program_that_prints_every_mark_does_not_hide_the_end_of_its_node(make_run: MakeRun, number: int) -> None:
    printed = bytes(range(32)) + run_folder.BEAT + run_folder.END
    folder = make_run(f'cat "$FOLDER/printed"; while [ ! -e "$FOLDER/go" ]; do sleep 0.05; done; {FINISHED}')
    (folder / "printed").write_bytes(printed)
    assert node("start", str(folder)).returncode == 0
    words = (sys.executable, "-m", "tridock.node", "follow", "--keepalive", str(folder))
    following = LocalHost().stream(Command.of("sh", "-c", 'echo $$; exec "$@"', "sh", *words))
    stream = LogStream(following, "a", folder.name)
    shown = b""

    def show() -> None:
        nonlocal shown
        for part in stream:
            shown += part
            if printed in shown:
                os.kill(int(shown.split()[0]), number)

    with pytest.raises(ClusterError, match=f"a: its node ended while {folder.name} was followed"):
        show()
    assert shown.partition(b"\n")[2].startswith(printed)
    (folder / "go").touch()
    wait_until((folder / "exit_code").exists)


@pytest.mark.parametrize("options", [("0",), ("0", "--prefix")], ids=["one", "prefixed"])
def test_large_logs_in_little_memory(make_run: MakeRun, options: tuple[str, ...]) -> None:
    folder = make_run("exit 0")
    write(folder, 0, ("a line of a log of many\n" * 40_000 + "x" * 30_000_000 + "\n") * 8)
    size = (folder / "logs/rank-0.log").stat().st_size
    words = [sys.executable, "-m", "tridock.node", "rank-logs", folder.name, *options]
    words += ["--workspace", str(folder.parent.parent)]
    counted = ["bash", "-o", "pipefail", "-c", 'ulimit -v 150000; "$@" | wc -c', "sh", *words]
    assert int(subprocess.run(counted, stdout=subprocess.PIPE, check=True).stdout) >= size


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


def test_a_progress_bar_is_followed_by_its_states_and_whole_in_the_log(make_run: MakeRun) -> None:
    folder = make_run(f'while [ ! -e "$FOLDER/go" ]; do sleep 0.05; done; {FINISHED}')
    arguments = ["rank-logs", folder.name, "0", "--follow", "--workspace", str(folder.parent.parent)]
    assert node("start", str(folder)).returncode == 0
    with subprocess.Popen([sys.executable, "-m", "tridock.node", *arguments], stdout=subprocess.PIPE) as follow:
        assert follow.stdout is not None
        write(folder, 0, "\r  1%|   |")
        assert follow.stdout.readline() == b"  1%|   |\n"
        states = "".join(f"\r {percent}%|## |" for percent in range(2, 100))
        write(folder, 0, states)
        assert follow.stdout.readline() == b" 99%|## |\n"
        write(folder, 0, "\r100%|###|\n")
        assert follow.stdout.readline() == b"100%|###|\n"
        (folder / "go").touch()
        assert follow.stdout.read() == b""
    wait_until((folder / "exit_code").exists)
    words = [sys.executable, "-m", "tridock.node", *arguments[:3], *arguments[4:]]
    assert subprocess.run(words, capture_output=True, check=True).stdout == (folder / "logs/rank-0.log").read_bytes()
