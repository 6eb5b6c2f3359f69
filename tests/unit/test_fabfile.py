"""`fab` and the same subcommands of `tridock` as a user types them: what needs no host."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fabric import Config, Executor

from tests.patience import STEP_S
from tridock import __version__
from tridock.cli import main
from tridock.cli.fab import COMMANDS, Program, collection

ROOT = Path(__file__).parents[2]
TASKS = (
    "cancel",
    "check",
    "data",
    "down",
    "fetch",
    "keys",
    "launch",
    "logs",
    "plan",
    "report",
    "reproduce",
    "resume",
    "run",
    "runs",
    "status",
    "stop",
    "triage",
    "up",
    "watch",
)


def fab(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("fab"))
    argv = [program, "--search-root", str(ROOT), *arguments]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=STEP_S)


def test_every_task_is_listed() -> None:
    listed = [line.split()[0] for line in fab("--list").stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    assert tuple(listed) == TASKS


def fab_here(*arguments: str) -> int:
    """The same in this process, which takes a tenth of the time; its exit code. What it says, ``capfd`` has."""
    try:
        Program(namespace=collection(), executor_class=Executor, config_class=Config).run(["fab", *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_the_help_of_the_subcommand(task: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here(task, "--help") == 0
    shown = capfd.readouterr().out
    with pytest.raises(SystemExit):
        main([*COMMANDS[task], "--help"])
    wanted = capfd.readouterr().out.partition("\n\n")[2]
    assert shown.partition("\n\n")[2] == wanted.replace(f"tridock {' '.join(COMMANDS[task])}", f"fab {task}")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("program", ["fab", "tridock"])
def test_a_hostfile_is_required(
    task: str, program: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRIDOCK_HOSTS", raising=False)
    run = (lambda: fab_here(task)) if program == "fab" else (lambda: main(COMMANDS[task]))
    if task == "runs":  # there are those of this machine
        assert run() == 0
        return
    assert run() == 2
    done = capfd.readouterr()
    assert done.out == ""
    if task == "plan":
        assert (
            done.err
            == "--hosts: or --nodes must describe the cluster; give a DeepSpeed hostfile, or a number of --nodes\n"
        )
    elif task == "report":
        todo = "give runs/<run-id>, a Megatron log with --log, or a cluster with --hosts"
        assert done.err == f"--run: is missing; {todo}\n"
    else:
        assert done.err == (
            "--hosts: is missing, and there is no ./hostfile; "
            "give a DeepSpeed hostfile: a line `host slots=8` for each host, as in hostfiles/example\n"
        )


@pytest.mark.parametrize("task", TASKS)
def test_a_missing_hostfile_is_never_a_local_run(task: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here(task, "--hosts", "nowhere/lab") == 2
    assert capfd.readouterr().err == (
        "nowhere/lab: the hostfile is missing; got no such file; give the path of a hostfile; "
        "a run never falls back to this machine alone\n"
    )


def test_the_hostfile_that_is_here_is_the_default(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRIDOCK_HOSTS", raising=False)
    (tmp_path / "hostfile").write_text("here slots=2\n")
    (tmp_path / "lab").write_text("lab-1 slots=2\n")
    dry = ("launch", "--dry-run", "--config", str(ROOT / "configs" / "demo.yaml"))
    assert main(dry) == 0
    assert "--master_addr here " in capfd.readouterr().out
    monkeypatch.setenv("TRIDOCK_HOSTS", "lab")
    assert fab_here(*dry) == 0
    assert "--master_addr lab-1 " in capfd.readouterr().out
    assert fab_here(*dry, "--hosts", "hostfile") == 0
    assert "--master_addr here " in capfd.readouterr().out


def test_fabrics_own_options_before_the_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=2\n")
    config = str(ROOT / "configs" / "demo.yaml")
    assert fab_here("--dry", "--hosts", str(tmp_path / "lab"), "launch", "--config", config) == 0
    assert "--master_addr gpu-1 " in capfd.readouterr().out
    assert fab_here("--dry", "up", "--hosts", str(tmp_path / "lab")) == 2
    assert capfd.readouterr().err == "--dry: up cannot run dry; leave it out\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "fab: No idea what 'nope' is!; see fab --list, and fab --help TASK"),
        (("launch", "--set", "--dry-run"), "fab launch: error: argument --set: expected one argument"),
        (("up", "--nope"), "fab: error: unrecognized arguments: --nope"),
        ((), "fab: a task is missing; give one of those above, as in fab launch --hosts hostfile"),
    ],
)
def test_a_wrong_command_line_ends_as_that_of_tridock(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fab_here(*arguments) == 2
    assert capfd.readouterr().err.splitlines()[-1] == message
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_the_version_is_tridocks() -> None:
    shown = fab("--version").stdout.splitlines()
    assert shown[0] == f"tridock {__version__}"
    assert shown[1].startswith("Fabric ")


@pytest.mark.parametrize("arguments", [("launch", "--hosts", "a lab"), ("nope",)])
def test_fabrics_own_program_hands_over_to_that_of_venv(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A system's Fabric may have none of our packages; its own end is another for a wrong command line."""
    (tmp_path / "clone" / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "fabfile.py", tmp_path / "clone")
    blind = "import sys\nfor name in ('tridock', 'pydantic', 'rich', 'yaml'): sys.modules[name] = None\n"
    script = f"{blind}from fabric.main import program\nprogram.run(['fab', *sys.argv[1:]])"
    argv = [sys.executable, "-c", script, *arguments]
    run = functools.partial(subprocess.run, argv, cwd=tmp_path / "clone", capture_output=True, text=True, check=False)
    done = run()
    assert done.returncode == 3
    todo = f"run `make image` or `make venv-operator` in {tmp_path}/clone, then ./fab"
    missing = "tridock, pydantic, rich, yaml"
    assert done.stderr == f"fab: Python packages are missing; got no {missing} in {sys.prefix}; {todo}\n"
    python = tmp_path / "clone" / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    assert run().stdout.splitlines() == ["-m", "tridock.cli.fab", *arguments]


def test_a_pipe_that_is_closed_early_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=2\n")
    launch = f"launch --hosts {tmp_path}/lab --config configs/demo.yaml --dry-run --verbose"
    for command in (f"fab {launch}", f"tridock {launch}", "fab --list"):
        line = f"{command} | head -n 1"
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert (len(done.stdout.splitlines()), done.stderr) == (1, "")


def test_a_dry_run_shows_the_command_and_every_file_and_touches_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=2\ngpu-2 slots=2\n")
    config = str(ROOT / "configs" / "demo.yaml")
    monkeypatch.chdir(tmp_path)
    assert fab_here("launch", "--hosts", str(tmp_path / "lab"), "--config", config, "--dry-run") == 0
    page = capfd.readouterr().out
    assert len(page.splitlines()) < 60
    assert "TP1 PP1 DP4: 4 ranks on 2 nodes" in page
    assert "# files of the run (--verbose prints them): experiment.yaml, plan.json," in page
    assert fab_here("launch", "--hosts", str(tmp_path / "lab"), "--config", config, "--dry-run", "--verbose") == 0
    stdout = capfd.readouterr().out
    shown = [line.removeprefix("# ") for line in stdout.splitlines() if line.startswith("# ")]
    files = [
        "experiment.yaml",
        "plan.json",
        "manifest.json",
        "hostfile",
        "deepspeed_env",
        "launch.sh",
        "ds_config.json",
    ]
    assert [line for line in shown if line in files] == files
    assert "--master_addr gpu-1 " in stdout
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]


def _lab(folder: Path, gpu: str) -> str:
    (folder / "lab").write_text("".join(f"gpu-{number} slots=4\n" for number in range(4)))
    (folder / "lab.yaml").write_text(f"gpu: {gpu}\n")
    return str(folder / "lab")


def test_a_launch_that_does_not_fit_is_refused_unless_forced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "jean-zay" / "7.5b.yaml")
    arguments = ("launch", "--hosts", _lab(tmp_path, "8gib"), "--config", config, "--dry-run", "--verbose")
    assert fab_here(*arguments) == 2
    assert capfd.readouterr() == (
        "",
        f"{config}: a rank of stage 0 needs more memory than the 8.0 GiB of a 8gib; got 10.1 GiB; "
        "see `tridock plan --search` for layouts that fit, or start it all the same with --force\n",
    )
    assert fab_here(*arguments, "--force") == 0
    shown = capfd.readouterr().out.split("# plan.json\n")[1].split("\n# ")[0]
    plan = json.loads(shown)
    assert (plan["verdict"], plan["world_size"]) == ("no-fit", 16)
    assert len(plan["memory"]["stages"]) == 4


def test_a_plan_of_a_cluster_whose_gpu_is_named_contacts_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "jean-zay" / "7.5b.yaml")
    arguments = ("plan", "--hosts", _lab(tmp_path, "v100-16gb"), "--config", config)
    assert fab_here(*arguments, "--json") == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "tight"
    assert fab_here(*arguments) == 0
    assert "TP4 PP4 DP1: 16 ranks on 4 nodes" in capfd.readouterr().out
    assert fab_here(*arguments, "--search") == 0
    assert "best first" in capfd.readouterr().out
    assert fab_here(*arguments, "--tokens", "many") == 2
    assert capfd.readouterr().err.endswith("error: argument --tokens: invalid float value: 'many'\n")


def test_a_plan_is_made_without_a_host_that_does_not_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "lab").write_text("127.0.0.1 slots=2\n")
    (tmp_path / "lab.yaml").write_text(f"ssh: {{port: {port}, retries: 0, connect_timeout: {STEP_S}}}\n")
    assert fab_here("plan", "--hosts", str(tmp_path / "lab"), "--ask-hosts", "--json") == 0
    done = capfd.readouterr()
    assert done.err.startswith("127.0.0.1: ")
    assert json.loads(done.out)["memory"]["gpu"] is None


def test_a_check_wants_an_experiment_before_it_changes_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert fab_here("check", "--hosts", "hostfiles/twin", "--set", "train.seed=7") == 2
    assert capfd.readouterr().err == "--set: needs an experiment, but none is named; name one with --config\n"


def test_all_problems_of_an_experiment_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=3\n")
    arguments = [
        f"--set={field}" for field in ("model.num_attention_heads=3", "batch.global_batch_size=8", "optimizer.min_lr=1")
    ]
    config = "configs/demo.yaml"
    assert fab_here("launch", "--hosts", str(tmp_path / "lab"), "--config", config, "--dry-run", *arguments) == 2
    assert capfd.readouterr().err.splitlines() == [
        "configs/demo.yaml: model.num_attention_heads: must divide hidden_size 256; got 3; "
        "use 2 or 4, or set model.kv_channels",
        "configs/demo.yaml: batch.global_batch_size: must be a multiple of micro_batch_size 4 x data parallel size 3; "
        "got 8; use 12, or leave it out",
        "configs/demo.yaml: optimizer.min_lr: must not exceed lr 0.001; got 1; lower it",
    ]


def test_status_with_no_host_that_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "lab").write_text("gpu-1 slots=4\n")
    (tmp_path / "ssh_config").write_text(f"Host gpu-1\n  HostName 127.0.0.1\n  Port {port}\n")
    (tmp_path / "lab.yaml").write_text(f"ssh: {{config_file: {tmp_path}/ssh_config, retries: 0}}\n")
    said = (
        f"gpu-1: does not answer ssh at 127.0.0.1 port {port}; got Connection refused; "
        "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between"
    )
    done = fab("status", "--hosts", str(tmp_path / "lab"))
    assert [cell.strip() for cell in done.stdout.split("│")[1:-1]] == ["gpu-1", "4", "unreachable", ""]
    assert (done.returncode, done.stderr) == (3, f"{said}\n")
    for command in ("status", "runs"):
        done = fab(command, "--hosts", str(tmp_path / "lab"), "--json")
        assert (done.returncode, done.stderr) == (3, f"{said}\n")
        found = json.loads(done.stdout)
        assert found["problems"] == [{"field": "gpu-1", "message": said, "nearest": []}]
        assert found["runs"] == []


def test_a_program_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("host-a slots=2\nhost-b slots=2\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train it.py").touch()
    options = ("--hosts", str(tmp_path / "hostfile"), "--workdir", str(tmp_path / "code"), "--dry-run")
    done = fab("run", *options, "--nodes", "1", "--", "torchrun", "train it.py", "--nodes", "a b")
    assert (done.returncode, done.stderr) == (0, "")
    assert "torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 " in done.stdout
    assert done.stdout.splitlines()[2].endswith(" 'train it.py' --nodes 'a b'")
    missing = fab("run", *options)
    assert missing.returncode == 2
    assert missing.stderr.startswith("PROGRAM: or --config must name the program, but not both; ")
