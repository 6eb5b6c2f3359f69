"""Temporary names: unique, short enough, and removed after a kill by who makes them, not by anybody else."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tridock.contracts.partials import partial_folder, partial_of, remove_left_files, remove_left_folders
from tridock.contracts.run_folder import write_atomic

KILLED = """
import os, sys
from pathlib import Path
from tridock.contracts import partials, run_folder
path = Path(sys.argv[1])
if sys.argv[2] == "file":
    os.replace = lambda *_, **__: os.kill(os.getpid(), 9)
    run_folder.write_atomic(path, b"half")
with partials.partial_folder(path) as folder:
    (folder / "half").touch()
    os.kill(os.getpid(), 9)
"""


def kill(path: Path, kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), kind], check=False)
    assert done.returncode == -signal.SIGKILL


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_writer_leaves_one_thing_which_the_next_removes(tmp_path: Path) -> None:
    path = tmp_path / "na[m]e"
    kill(path, "file")
    kill(path, "folder")
    assert len(names(tmp_path)) == 2
    remove_left_files(tmp_path / "other")
    remove_left_folders(tmp_path / "other")
    assert len(names(tmp_path)) == 2
    remove_left_files(path)
    assert [it.is_dir() for it in tmp_path.iterdir()] == [True]
    with partial_folder(path) as folder:
        assert names(tmp_path) == [folder.parent.name]
    assert names(tmp_path) == []


def test_the_folder_of_a_living_writer_stays(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "a") as first, partial_folder(tmp_path / "a") as second:
        remove_left_folders(tmp_path / "a")
        assert (first.is_dir(), second.is_dir()) == (True, True)
        second.rename(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_many_writers_at_once(tmp_path: Path) -> None:
    """None takes another's folder, which has no lock for a moment, for one that was left."""
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(100):
                with partial_folder(tmp_path / "a") as folder:
                    (folder / "b").touch()
                    (folder / "b").unlink()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failures, names(tmp_path)) == ([], [])


@pytest.mark.parametrize("remove", [remove_left_files, remove_left_folders])
def test_what_is_of_another_type_stays(tmp_path: Path, remove: object) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "folder").mkdir(parents=True)
    (elsewhere / "file").touch()
    here = tmp_path / "here"
    here.mkdir()
    for number, target in enumerate(("folder", "file", "none")):
        (here / f".a.{number}.0a1b2c3d.part").symlink_to(elsewhere / target)
    os.mkfifo(here / ".a.3.0a1b2c3d.part")
    wrong = here / ".a.4.0a1b2c3d.part"
    wrong.mkdir() if remove is remove_left_files else wrong.touch()
    before = names(here)
    assert callable(remove)
    remove(here / "a")
    assert names(here) == before
    assert names(elsewhere) == ["file", "folder"]


def test_a_name_of_any_length_has_a_temporary_one(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 255), tmp_path / ("ž" * 127), tmp_path / os.fsdecode(b"\xff" * 255)):
        write_atomic(path, b"content")
        assert path.read_bytes() == b"content"
        partial_of(path).touch()
        remove_left_files(path)
    assert len(names(tmp_path)) == 3


def test_a_second_ctrl_c_while_the_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), partial_folder(tmp_path / "a"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
