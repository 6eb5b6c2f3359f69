"""`fab` over a real sshd on loopback to nodes without Docker: a stand-in for it runs their commands on this machine."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.sshd import ROOT, Sshd, free_port, wait_until
from tests.patience import STEP_S
from tridock.contracts.run_folder import PYTHON

RUN = "tiny-20260102-030405-abcd"

# One node that runs. What is asked of it inside sees the folder $WORKSPACE as /workspace.
LABELS = {"tridock.workspace": "$HOME/tridock/lab/workspace"}
STATE = {"Running": True, "ExitCode": 0}
NODE = {"Id": "1", "Image": "sha256:0123456789abcdef", "Config": {"Labels": LABELS}, "State": STATE}
DOCKER = rf"""#!/bin/bash
case $1 in
version) echo 28.1 ;;
inspect)
  echo '{{"Id":"sha256:0123456789abcdef","RootFS":{{}}}}'
  node={shlex.quote(json.dumps(NODE, separators=(",", ":")))}
  echo "${{node/\$HOME/$HOME}}" ;;
exec)
  while [ "$1" != tridock-lab ]; do shift; done
  shift
  export PYTHONPATH={shlex.quote(str(ROOT))}
  if [ "$1" = {PYTHON} ]; then exec {shlex.quote(sys.executable)} "${{@:2}}" --workspace "$WORKSPACE"; fi
  exec "${{@//\/workspace/$WORKSPACE}}" ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac
"""


@dataclass
class Lab:
    """Two hosts behind an sshd each; the operator's project is a folder of its own."""

    folder: Path
    programs: Path
    workspaces: dict[str, Path]
    sshds: dict[str, Sshd]

    def configure(self, **ports: int) -> None:
        """Writes hostfile and ssh configuration; ``ports`` replaces where a host is looked for."""
        (self.folder / "lab").write_text("".join(f"{name} slots=2\n" for name in self.sshds))
        (self.folder / "lab.yaml").write_text(
            f"ssh: {{config_file: {self.folder}/ssh_config, retries: 0, connect_timeout: {STEP_S}}}\n"
        )
        blocks = []
        for name, sshd in self.sshds.items():
            port = ports.get(name.replace("-", "_"), sshd.port)
            blocks.append(
                f"Host {name}\n HostName 127.0.0.1\n Port {port}\n IdentityFile {sshd.client_key}\n"
                f" UserKnownHostsFile {sshd.known_hosts}\n GlobalKnownHostsFile none\n"
            )
        (self.folder / "ssh_config").write_text("".join(blocks))

    def argv(self, task: str, *arguments: str) -> list[str]:
        program = str(Path(sys.executable).with_name("fab"))
        return [program, "--search-root", str(ROOT), task, "--hosts", str(self.folder / "lab"), *arguments]

    def fab(self, task: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv, home = self.argv(task, *arguments), self.folder
        return subprocess.run(argv, cwd=home, capture_output=True, text=True, check=False, timeout=STEP_S)


@pytest.fixture
def lab(make_sshd: Callable[..., Sshd], tmp_path: Path) -> Iterator[Lab]:
    programs = tmp_path / "programs"
    programs.mkdir()
    make_program(programs / "docker", DOCKER)
    made = Lab(tmp_path / "operator", programs, {}, {})
    made.folder.mkdir()
    for name in ("gpu-1", "gpu-2"):
        workspace = made.workspaces[name] = tmp_path / f"of-{name}"
        (workspace / "runs").mkdir(parents=True)
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "WORKSPACE": str(workspace)}
        made.sshds[name] = make_sshd(name=name, environment=environment)
    made.configure()
    return made


def cells(table: str) -> list[list[str]]:
    """The rows of tables as Rich draws them."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]


def make_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make_run(workspace: Path, files: Mapping[str, bytes] | None = None) -> Path:
    folder = workspace / "runs" / RUN
    folder.mkdir(exist_ok=True)
    for name, content in {"exit_code": b"0\n", **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


# ---- status ----------------------------------------------------------------------------------------------------------


def test_status_shows_nodes_and_runs(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-2"])
    done = lab.fab("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert cells(done.stdout) == [
        ["gpu-1", "2", "running", "0123456789ab"],
        ["gpu-2", "2", "running", "0123456789ab"],
        [RUN, "", "done", "", "", "", ""],
    ]


def test_status_with_a_host_away_shows_the_others_and_their_runs(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-2"])
    port = free_port()
    lab.configure(gpu_1=port)
    done = lab.fab("status")
    assert cells(done.stdout) == [
        ["gpu-1", "2", "unreachable", ""],
        ["gpu-2", "2", "running", "0123456789ab"],
        [RUN, "", "done", "", "", "", ""],
    ]
    assert done.stderr == (
        f"gpu-1: does not answer ssh at 127.0.0.1 port {port}; got Connection refused; "
        "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between\n"
        "gpu-2: no problem here; fix the others\n"
    )
    assert done.returncode == 3


def test_status_with_every_host_away(lab: Lab) -> None:
    lab.sshds["gpu-2"].known_hosts.write_text("")
    ports = {name: sshd.port for name, sshd in lab.sshds.items()}
    lab.sshds["gpu-1"].stop()
    done = lab.fab("status")
    assert cells(done.stdout) == [["gpu-1", "2", "unreachable", ""], ["gpu-2", "2", "unreachable", ""]]
    first, second = done.stderr.splitlines()
    assert first == (
        f"gpu-1: does not answer ssh at 127.0.0.1 port {ports['gpu-1']}; got Connection refused; "
        "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between"
    )
    assert second.startswith(
        f"gpu-2: its host key is not known here; got No ED25519 host key is known for [127.0.0.1]:{ports['gpu-2']}; "
    )
    assert done.returncode == 3


def test_status_with_a_wrong_request_shows_no_table(lab: Lab) -> None:
    (lab.folder / "ssh_config").write_text("Prot 22\n")
    done = lab.fab("status")
    got = f"{lab.folder}/ssh_config: line 1: Bad configuration option: prot"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"{name}: ssh cannot read its configuration; got {got}; fix what it names" for name in ("gpu-1", "gpu-2")
    ]


RANKS = [{"rank": n, "node": f"gpu-{1 + n // 2}", "slot": n % 2} for n in range(4)]
FILES = {
    "hostfile": b"gpu-1 slots=2\ngpu-2 slots=2\n",
    "experiment.yaml": b"name: tiny\ntrain:\n  train_iters: 12\n",
    "metrics.jsonl": b'{"iteration": 12, "loss": 2.5, "tokens_per_second": 1000.0}\n',
    "plan.json": json.dumps({"ranks": RANKS}).encode(),
}


def test_status_says_how_far_a_run_is(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-1"], FILES)
    row = cells(lab.fab("status").stdout)[-1]
    assert row[:6] == [RUN, "2", "done", "12/12", "2.5000", "1,000 tokens/s"]
    assert re.fullmatch(r"\d+ s ago", row[6])


def test_status_is_drawn_again_until_ctrl_c(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-1"], FILES)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        lab.argv("status", "--watch"), cwd=lab.folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        start_new_session=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as watching:  # fmt: skip
        os.close(theirs)
        shown = b""
        while shown.count(RUN.encode()) < 2:
            shown += os.read(ours, 1 << 16)
        (lab.workspaces["gpu-1"] / "runs" / RUN / "exit_code").write_text("4\n")
        while b"failed" not in shown:
            shown += os.read(ours, 1 << 16)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=STEP_S) == 0, shown.decode()
    os.close(ours)
    assert shown.count(b"\x1b[2J") >= 3
    assert b"Traceback" not in shown


def test_all_runs_newest_first(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-1"], FILES)
    older = lab.workspaces["gpu-2"] / "runs" / "tiny-20250102-030405-abcd"
    older.mkdir()
    (older / "exit_code").write_text("4\n")
    done = lab.fab("runs")
    assert (done.returncode, done.stderr) == (0, "")
    assert [row[:5] for row in cells(done.stdout)] == [
        [RUN, "gpu-1", "", "done", "0"],
        [older.name, "gpu-2", "", "failed", "4"],
    ]
    listed = json.loads(lab.fab("runs", "--json").stdout)["runs"]
    assert [(run["run_id"], run["exit_code"], run["head"]) for run in listed] == [
        (RUN, 0, "gpu-1"),
        (older.name, 4, "gpu-2"),
    ]


def test_logs_of_ranks(lab: Lab) -> None:
    for node, (first, second) in (("gpu-1", (0, 1)), ("gpu-2", (2, 3))):
        logs = {f"logs/rank-{rank}.log": f"I am {rank}\n".encode() for rank in (first, second)}
        make_run(lab.workspaces[node], {**FILES, **logs})
    assert lab.fab("logs", "--rank", "2").stdout == "I am 2\n"
    assert lab.fab("logs", "--rank", "3,0").stdout == "rank 3: I am 3\nrank 0: I am 0\n"
    assert lab.fab("logs", "--node", "gpu-2").stdout == "rank 2: I am 2\nrank 3: I am 3\n"
    assert lab.fab("logs", "--node", "gpu-2", "--rank", "3").stdout == "I am 3\n"
    followed = lab.fab("logs", "--rank", "0,1,2,3", "--follow")
    assert followed.returncode == 0, followed.stderr
    assert sorted(followed.stdout.splitlines()) == [f"rank {rank}: I am {rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "4,9"),
         "--rank: is not a rank of this run; got 4; use 0 to 3\n"
         "--rank: is not a rank of this run; got 9; use 0 to 3\n"),
        (("--rank", "x"), "--rank: must be a whole number; got 'x'; give a rank's number\n"),
        (("--node", "gpu-3"), "--node: has no rank of this run; got gpu-3; use one of: gpu-1, gpu-2\n"),
        (("--node", "gpu-1", "--rank", "2"), "--rank: is not on node gpu-1; got 2; it runs on gpu-2\n"),
    ],
)  # fmt: skip
def test_logs_of_ranks_that_there_are_not(lab: Lab, arguments: tuple[str, ...], message: str) -> None:
    make_run(lab.workspaces["gpu-1"], FILES)
    done = lab.fab("logs", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_a_log_that_is_not_there(lab: Lab) -> None:
    make_run(lab.workspaces["gpu-1"], FILES)
    done = lab.fab("logs", "--rank", "1")
    assert done.returncode == 3
    assert done.stdout.startswith("rank 1: has no log here; got ")
    assert done.stderr == (
        "gpu-1: its ranks' logs could not be read to the end; got exit code 2; "
        "see the lines above, and tridock status\n"
    )


# ---- fetch -----------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


HEAD = {"exit_code": b"0\n", "plan.json": b"{}", "logs/rank-0.log": b"zero", "metrics.jsonl": b"whole"}
OTHER = {"exit_code": b"0\n", "plan.json": b"{}", "logs/rank-1.log": b"one", "metrics.jsonl": b"part"}
HEAD["traces/rank-0"] = os.urandom(3_000_000)
CHECKPOINTS = {"checkpoints/latest": b"12", "checkpoints/12/rank-0": b"saved"}
TOGETHER = {**OTHER, **HEAD}


@pytest.fixture
def run(lab: Lab) -> Path:
    """A run that both nodes have a part of; gives where it comes home."""
    make_run(lab.workspaces["gpu-1"], {**HEAD, **CHECKPOINTS})
    make_run(lab.workspaces["gpu-2"], OTHER)
    return lab.folder / "runs" / RUN


def test_fetch_brings_every_nodes_part_and_the_heads_word_counts(lab: Lab, run: Path) -> None:
    done = lab.fab("fetch")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"runs/{RUN}\n", "")
    assert files_of(lab.folder / "runs") == {f"{RUN}/{name}": content for name, content in TOGETHER.items()}
    assert [path.name for path in (lab.folder / "runs").iterdir()] == [RUN]
    assert run.stat().st_mode & 0o777 == 0o755
    done = lab.fab("fetch", "--json")
    assert (json.loads(done.stdout), done.stderr) == ({"version": 1, "run_id": RUN, "folder": f"runs/{RUN}"}, "")


def test_fetch_again_adds_checkpoints_and_replaces_each_file_in_one_go(lab: Lab, run: Path) -> None:
    assert lab.fab("fetch").returncode == 0
    (run / "notes").write_text("mine")
    (lab.workspaces["gpu-1"] / "runs" / RUN / "metrics.jsonl").write_bytes(b"whole and more")
    with (run / "metrics.jsonl").open("rb") as old:
        done = lab.fab("fetch", "--checkpoints")
        assert old.read() == b"whole"
    assert done.returncode == 0, done.stderr
    note = f"note: fetched without its tokenizer: {RUN}/experiment.yaml is missing or not readable"
    assert done.stderr.splitlines() == [note]
    assert files_of(run) == {**TOGETHER, **CHECKPOINTS, "metrics.jsonl": b"whole and more", "notes": b"mine"}


# Sends the beginning of the archive, then hangs.
SLOW_TAR = """#!/bin/sh
/bin/tar "$@" | head -c 500000
touch "$WORKSPACE/hangs"
while [ -e "$WORKSPACE/hangs" ] && kill -0 $PPID; do sleep 0.2; done 2>/dev/null
"""


def start_slow_fetch(lab: Lab, **options: object) -> subprocess.Popen[str]:
    """A fetch whose archives start to arrive, and do not end."""
    make_program(lab.programs / "tar", SLOW_TAR)
    settings = {"cwd": lab.folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    process: subprocess.Popen[str] = subprocess.Popen(lab.argv("fetch", "--checkpoints"), **settings)  # type: ignore[call-overload]
    archives = lab.folder / "runs"
    wait_until(lambda: any(path.stat().st_size >= 400_000 for path in archives.glob(".*.part/new/gpu-1.tar.gz")))
    wait_until(lambda: all((workspace / "hangs").exists() for workspace in lab.workspaces.values()))
    return process


def test_ctrl_c_during_a_fetch_leaves_everything_as_it_was(lab: Lab, run: Path) -> None:
    assert lab.fab("fetch").returncode == 0
    process = start_slow_fetch(lab)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=STEP_S)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert [path.name for path in run.parent.iterdir()] == [RUN]
    assert files_of(run) == TOGETHER


def test_a_fetch_that_breaks_off_leaves_nothing(lab: Lab, run: Path) -> None:
    process = start_slow_fetch(lab)
    for sshd in lab.sshds.values():
        sshd.end_sessions()
    _, errors = process.communicate(timeout=STEP_S)
    assert process.returncode == 3
    assert [line.split(" while ")[0] for line in errors.splitlines()] == [
        "gpu-1: the connection was lost", "gpu-2: the connection was lost",
    ]  # fmt: skip
    assert list(run.parent.iterdir()) == []


def test_a_fetch_onto_a_disk_that_is_full(lab: Lab, run: Path) -> None:
    done = subprocess.run(
        lab.argv("fetch", "--checkpoints"), cwd=lab.folder, capture_output=True, text=True, check=False, timeout=STEP_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )  # fmt: skip
    assert done.stderr == (
        f"runs/{RUN}: could not be written; got File too large; free space there, or make it writable, then try again\n"
    )
    assert done.returncode == 3
    assert list(run.parent.iterdir()) == []


def test_a_fetch_leaves_links_out_and_names_them(lab: Lab, run: Path) -> None:
    (lab.workspaces["gpu-2"] / "runs" / RUN / "passwd").symlink_to("/etc/passwd")
    done = lab.fab("fetch")
    note = f"note: not fetched, since they are links, special files or git's own: {RUN}/passwd\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"runs/{RUN}\n", note)
    assert files_of(run) == TOGETHER
    assert not (run / "passwd").is_symlink()


def test_a_fetch_that_tar_refuses(lab: Lab, run: Path) -> None:
    make_program(lab.programs / "tar", "#!/bin/sh\necho 'tar: no such thing' >&2\nexit 1\n")
    done = lab.fab("fetch")
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["gpu-1", "gpu-2"]
    ending = " failed with exit code 1; got tar: no such thing; fix that there, then try again"
    assert all(line.endswith(ending) for line in lines)


def test_a_folder_that_goes_away_before_it_is_fetched(lab: Lab, run: Path) -> None:
    docker = lab.programs / "docker"
    docker.write_text(DOCKER.replace('  exec "${@//', '  rm -rf "$WORKSPACE"/runs/*\n  exec "${@//'))
    done = lab.fab("fetch")
    assert done.stderr == f"{RUN}: its folder is on no node any more; see tridock status for the runs\n"
    assert (done.returncode, list(run.parent.iterdir())) == (3, [])


def test_what_comes_is_counted_on_a_terminal(lab: Lab, run: Path) -> None:
    make_run(lab.workspaces["gpu-1"], {"checkpoints/13": os.urandom(30_000_000)})
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = lab.argv("fetch", "--checkpoints")
    with subprocess.Popen(command, cwd=lab.folder, stdout=subprocess.DEVNULL, stderr=its, env=environment) as process:
        os.close(its)
        text = b""
        while True:
            try:
                text += os.read(ours, 65536)
            except OSError:  # nobody has it open any more
                break
    os.close(ours)
    assert process.returncode == 0
    assert (f"fetch {RUN}".encode() in text, b"MB/s" in text) == (True, True)
