"""What killed processes leave: locks of torch's extension builder, and shared memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.unit.node.conftest import answer, wait_until
from tridock.contracts import environment, run_folder
from tridock.contracts.codec import decode
from tridock.contracts.rank_status import AgentMessage
from tridock.contracts.supervision import Supervision
from tridock.node.agent import leftovers
from tridock.node.agent.leftovers import Leftovers, lock_waits
from tridock.node.agent.processes import find_processes
from tridock.node.agent.rank_status import RankMonitor
from tridock.node.probes import held_files
from tridock.node.probes.build_locks import extension_folders, locks_in, stale_locks, unheld
from tridock.node.probes.held_files import OwnFile, held, removed, sees_all_users_of

ROOT = Path(__file__).parents[3]
RUN = run_folder.new_run_id("left")
HOLD = """
import os, sys, time
open_ends = [os.open(path, os.O_CREAT | os.O_EXCL) for path in sys.argv[2:]]  # as torch's FileBaton
open(sys.argv[1], "w").close()
time.sleep(600)
"""
MAP = """
import mmap, os, sys, time
for path in sys.argv[2:]:  # as NCCL and torch
    path = path.replace("PID", str(os.getpid()))
    segment = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(segment, 4096)
    globals()[path] = mmap.mmap(segment, 4096)
    os.close(segment)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
Start = Callable[..., "subprocess.Popen[bytes]"]
Agent = tuple[IO[str], Iterator[AgentMessage]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that holds files, and waits until it does."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str, *files: Path | str, run: str = RUN, **env: str) -> subprocess.Popen[bytes]:
        ready = tmp_path / f"ready-{len(started)}"
        argv = [sys.executable, "-c", code, str(ready), *map(str, files)]
        process = subprocess.Popen(argv, env={**os.environ, environment.RUN_ID: run, **env})
        started.append(process)
        wait_until(ready.exists)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an extension, below the root that this process and its children have."""
    folder = tmp_path / "extensions" / "fused adam"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder.parent))
    return folder


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that other machines see, and in a container with the host's shared memory."""
    monkeypatch.setattr(leftovers, "sees_all_users_of", lambda _: False)
    monkeypatch.setattr(leftovers, "sees_all_users_of_shared_memory", lambda: False)


def see_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "sees_all_users_of", lambda _: True)
    monkeypatch.setattr(leftovers, "sees_all_users_of_shared_memory", lambda: True)


# ---- locks of the builder ----------------------------------------------------------------------------------------


def test_where_extensions_are_built(tmp_path: Path) -> None:
    for name in ("own/a", "home/.cache/torch_extensions/py311_cu128/b", "cache/torch_extensions/py311_cpu/c"):
        (tmp_path / name).mkdir(parents=True)
    home = {"HOME": str(tmp_path / "home")}
    assert [it.name for it in extension_folders({**home, "TORCH_EXTENSIONS_DIR": str(tmp_path / "own")})] == ["a"]
    assert [it.name for it in extension_folders(home)] == ["b"]
    assert [it.name for it in extension_folders({**home, "XDG_CACHE_HOME": str(tmp_path / "cache")})] == ["c"]
    assert list(extension_folders({"HOME": str(tmp_path / "none")})) == []


def test_a_lock_is_stale_once_its_process_has_ended(extension: Path, start: Start) -> None:
    process = start(HOLD, extension / "lock")
    assert stale_locks() == ()
    end(process)
    (found,) = stale_locks()
    assert found.path == str(extension / "lock")
    assert 0 <= found.age_s < 600
    (extension / "lock").write_text("another program's")
    assert stale_locks() == ()


def test_a_process_that_hides_its_files_may_hold_them(
    extension: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(HOLD, extension / "lock")
    locks = locks_in([extension])
    own, hidden = held_files._numbers, [process.pid]

    def refused(pid: int, *names: set[str]) -> object:
        if pid in hidden:
            raise PermissionError
        return own(pid, *names)

    monkeypatch.setattr(held_files, "_numbers", refused)
    assert held(locks) == set(locks)
    assert unheld(locks) == []
    end(process)
    assert unheld(locks) == locks


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_lock_that_a_killed_rank_left_is_removed(
    extension: Path, start: Start, monkeypatch: pytest.MonkeyPatch, is_noted: bool
) -> None:
    """Seen in its hands, on any file system; else where nobody else can hold it."""
    (hide_others if is_noted else see_others)(monkeypatch)
    left = Leftovers(RUN)
    process = start(HOLD, extension / "lock")
    if is_noted:
        left.note()
    assert left.clear() == []  # it lives
    if is_noted:
        left.note()
    end(process)
    assert left.clear() == [str(extension / "lock")]
    assert not (extension / "lock").exists()


def test_locks_of_others_stay(extension: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that another machine may hold, those of a live run, and one that was made anew."""
    hide_others(monkeypatch)
    names = ("of-a-machine", "of-a-run", "anew")
    machine, run, anew = (extension.parent / name for name in names)
    for folder in (machine, run, anew):
        folder.mkdir()
    (machine / "lock").touch()
    own = start(HOLD, anew / "lock")
    start(HOLD, run / "lock", run=run_folder.new_run_id("other"))
    left = Leftovers(RUN)
    left.note()
    end(own)
    (anew / "lock").unlink()
    (anew / "lock").touch()
    assert left.clear() == []
    see_others(monkeypatch)
    assert left.clear() == [str(anew / "lock"), str(machine / "lock")]
    assert (run / "lock").exists()


def test_the_folder_in_which_a_rank_compiles_may_be_any(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_others(monkeypatch)
    build = tmp_path / "megatron" / "fused_kernels" / "build"
    build.mkdir(parents=True)
    rank = start(HOLD, build / "lock")
    env = {**os.environ, environment.RUN_ID: RUN}
    with subprocess.Popen(["sleep", "600"], cwd=build, env=env) as ninja:
        # One in the middle of its exec has no environment to be found by.
        wait_until(lambda: ninja.pid in [process.pid for process in find_processes(RUN)])
        left = Leftovers(RUN)
        left.note()
        ninja.kill()
    end(rank)
    assert left.clear() == [str(build / "lock")]


def test_which_file_systems_this_node_alone_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = ["9 1 8:1 / / rw - overlay overlay rw", f"9 1 0:5 / {tmp_path}/nfs\\040home rw - nfs4 server:/ rw"]
    read = Path.read_text

    def as_mounted(path: Path, **kind: str) -> str:
        return "\n".join(mounts) if path == Path("/proc/self/mountinfo") else read(path, **kind)

    (tmp_path / "nfs home").mkdir()
    monkeypatch.setattr(Path, "read_text", as_mounted)
    monkeypatch.setattr(held_files, "_namespace", lambda kind: {"pid": held_files._FIRST_PID}[kind])
    assert sees_all_users_of(tmp_path)
    assert not sees_all_users_of(tmp_path / "nfs home")
    monkeypatch.setattr(held_files, "_namespace", lambda kind: {"pid": "pid:[1]"}[kind])
    monkeypatch.setattr(held_files, "_device", lambda path: 1 if path == Path("/") else 2)
    assert not sees_all_users_of(tmp_path)  # a folder of the host in a container


@pytest.mark.parametrize(
    ("pid", "ipc", "sees_all"),
    [("first", "first", True), ("own", "own", True), ("own", "first", False), ("own", "", False)],
)
def test_whose_shared_memory_it_is(monkeypatch: pytest.MonkeyPatch, pid: str, ipc: str, sees_all: bool) -> None:
    first = {"pid": held_files._FIRST_PID, "ipc": held_files._FIRST_IPC}
    named = {"pid": pid, "ipc": ipc}
    monkeypatch.setattr(held_files, "_namespace", lambda kind: first[kind] if named[kind] == "first" else named[kind])
    assert held_files.sees_all_users_of_shared_memory() is sees_all


SLEEP = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"
WAIT = """
import sys
from importlib.machinery import SourceFileLoader
baton = SourceFileLoader("file_baton", sys.argv[2]).load_module()  # without the seconds that torch takes
open(sys.argv[1], "w").close()
baton.FileBaton(sys.argv[3]).wait()
"""


def test_a_rank_that_waits_for_a_lock_is_known(tmp_path: Path, extension: Path, start: Start) -> None:
    """By its stack (0), as py-spy reads it (2), or its output (1); unlike one that built (3) or is elsewhere (4)."""
    folder = tmp_path / RUN
    (folder / "logs").mkdir(parents=True)
    baton = ("/venv/torch/utils/file_baton.py:48 in wait", "/venv/torch/utils/cpp_extension.py:1 in load")
    root = f"Using {extension.parent} as PyTorch extensions root..."
    (folder / run_folder.rank_log(1)).write_text(f"step 1\n{root}\n")
    (folder / run_folder.rank_log(3)).write_text(f"{root}\nbuilt\n")
    builder = start(HOLD, extension / "lock", run=run_folder.new_run_id("other"))
    for rank in (0, 1, 3, 4):
        start(SLEEP, RANK=str(rank))
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    start(WAIT, Path(torch.origin).parent / "utils/file_baton.py", extension / "lock", RANK="2")
    stacks = {0: baton, 4: ("/program.py:1 in main", *baton[1:])}
    monitor = RankMonitor(folder, range(5), observed=True)
    wait_until(lambda: "in FileBaton.wait" in monitor.stacks([2]).get(2, ("",))[0])
    stacks |= monitor.stacks([2])
    assert lock_waits(folder, range(5), stacks) == {}  # a compiler that is slow
    end(builder)
    assert lock_waits(folder, range(5), stacks) == dict.fromkeys((0, 1, 2), str(extension / "lock"))


def test_nodes_report_stale_locks(extension: Path) -> None:
    (extension / "lock").touch()
    (lock,) = answer("node-report")["build_locks"]
    assert lock["path"] == str(extension / "lock")


# ---- shared memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SEGMENTS = ("torch_PID_1234_0", "nccl-Ab12cd", "psm_0a1b2c3d", "sem.mp-x1y2z3")


def test_segments_that_killed_ranks_held_are_removed(
    memory: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_others(monkeypatch)
    other = start(MAP, memory / "nccl-other", memory / "torch_PID_1_0", run=run_folder.new_run_id("other"))
    rank = start(MAP, *(memory / name for name in SEGMENTS), memory / "my-cache")
    (memory / "nccl-unknown").touch()
    stay = {"nccl-other", f"torch_{other.pid}_1_0", "my-cache", "nccl-unknown"}
    left = Leftovers(RUN, memory)
    left.note()
    before = names(memory)
    assert left.clear() == []  # it lives
    assert names(memory) == before
    left.note()
    end(rank)
    assert len(left.clear()) == len(SEGMENTS)
    assert set(names(memory)) == stay


def test_what_another_process_has_mapped_too_stays(memory: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    see_others(monkeypatch)
    rank = start(MAP, memory / "nccl-Ab12cd")
    attach = MAP.replace("os.O_CREAT | os.O_EXCL | ", "")
    start(attach, memory / "nccl-Ab12cd", run=run_folder.new_run_id("other"))
    left = Leftovers(RUN, memory)
    left.note()
    end(rank)
    assert left.clear() == []
    assert names(memory) == ["nccl-Ab12cd"]


def test_segments_that_nobody_was_seen_to_hold(memory: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, if they are younger than the attempt, and only where all processes are visible."""
    (memory / "nccl-before").touch()
    os.utime(memory / "nccl-before", (1, 1))
    left = Leftovers(RUN, memory)
    rank = start(SLEEP)
    left.note()
    for name in (f"torch_{rank.pid}_9_0", "torch_1_9_0", "nccl-Ab12cd", "psm_0a1b2c3d", "sem.mp-x1y2z3"):
        (memory / name).touch()
    see_others(monkeypatch)
    end(rank)
    assert [Path(path).name for path in left.clear()] == ["nccl-Ab12cd", f"torch_{rank.pid}_9_0"]
    assert names(memory) == ["nccl-before", "psm_0a1b2c3d", "sem.mp-x1y2z3", "torch_1_9_0"]


def test_a_file_that_has_changed_is_not_removed(memory: Path) -> None:
    path = memory / "nccl-Ab12cd"
    path.touch()
    found = OwnFile.at(path)
    assert found is not None
    path.unlink()
    path.write_text("another")
    assert removed([found]) == []
    assert path.exists()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """The orders of a node's agent, and its messages."""
    folder = tmp_path / RUN
    folder.mkdir()
    (folder / run_folder.SUPERVISION).write_text(Supervision("n1", {"n1": (0,)}, (), 1, 30.0).to_json())
    command = (sys.executable, "-m", "tridock.node", "agent", str(folder), "n1")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdin, (decode(AgentMessage, line) for line in process.stdout)
        process.kill()


def test_an_agent_removes_what_it_has_stopped(agent: Agent, extension: Path, start: Start) -> None:
    """Also what nobody but the stopped process has seen: it looks once more before it stops it."""
    orders, said = agent
    next(message for message in said if message.ranks is not None)
    start(HOLD, extension / "lock")
    orders.write("stop 0\n")
    orders.flush()
    stopped = next(message for message in said if message.stopped is not None)
    assert stopped.removed == (str(extension / "lock"),)
    assert names(extension) == []


def test_an_agent_says_once_what_it_removes_at_its_first_look(extension: Path, request: pytest.FixtureRequest) -> None:
    if not sees_all_users_of(extension):
        pytest.skip("others than this machine's visible processes may hold files here")
    (extension / "lock").touch()
    orders, said = request.getfixturevalue("agent")
    assert next(message.removed for message in said if message.removed) == (str(extension / "lock"),)
    assert names(extension) == []
    orders.write("stop 0\n")
    orders.flush()
    assert next(message for message in said if message.stopped is not None).removed == ()
