"""The entrypoint's functions that need no container: sourced, called, compared."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.contracts.codec import decode
from tridock.errors import Problem

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "entrypoint/entrypoint.sh"


def call(
    script: str, *, env: dict[str, str] | None = None, state: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash with the entrypoint's functions and an environment of its own."""
    given = {
        "PATH": os.environ["PATH"],
        "TRIDOCK_NODE": "node-1",
        "TRIDOCK_STATE": str(state or "/nowhere"),
        **(env or {}),
    }
    argv = ["bash", "-c", f"source {ENTRYPOINT}; {script}"]
    return subprocess.run(argv, env=given, capture_output=True, text=True, timeout=STEP_S, check=False)


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("0", True),
        ("1000", True),
        ("4294967294", True),
        ("", False),
        ("-1", False),
        ("01", False),
        ("1e3", False),
        ("a", False),
    ],
)
def test_ids(text: str, is_id: bool) -> None:
    assert (call(f"is_id '{text}' && echo yes || echo no").stdout == "yes\n") is is_id


@pytest.mark.parametrize(
    ("text", "is_port"),
    [("1", True), ("2222", True), ("65535", True), ("65536", False), ("0", False), ("", False), ("x", False)],
)
def test_ports(text: str, is_port: bool) -> None:
    assert (call(f"is_port '{text}' && echo yes || echo no").stdout == "yes\n") is is_port


def test_the_account_comes_first_and_once(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text(
        "root:x:0:0::/root:/bin/sh\ntridock:*:5:5::/old:/bin/sh\nubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n"
    )
    done = call(f"with_account {passwd} 'tridock:*:1000:1000::/home/tridock:/bin/bash' 1000")
    assert done.stdout == (
        "tridock:*:1000:1000::/home/tridock:/bin/bash\nroot:x:0:0::/root:/bin/sh\nubuntu:x:1000:1000::/home/ubuntu:/bin/sh\n"
    )


def test_root_stays_root_when_the_operator_is_root(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/sh\n")
    done = call(f"with_account {passwd} 'tridock:*:0:0::/home/tridock:/bin/bash' 0")
    assert done.stdout == "root:x:0:0::/root:/bin/sh\ntridock:*:0:0::/home/tridock:/bin/bash\n"


def test_only_the_clusters_variables_are_shared() -> None:
    env = {
        "NCCL_DEBUG": "WARN", "LD_LIBRARY_PATH": "/x", "TRIDOCK_CLUSTER": "lab", "lower_case": "1", "with.dot": "no",
        "HOME": "/root", "USER": "me", "TERM": "xterm", "SSH_CONNECTION": "1",
        "TRIDOCK_RUN_ID": "r", "TRIDOCK_WORLD_SIZE": "2",
    }  # fmt: skip
    pairs = call("shared_environment", env=env).stdout.rstrip("\0").split("\0")
    names = {pair.split("=")[0] for pair in pairs}
    assert names == {
        "NCCL_DEBUG",
        "LD_LIBRARY_PATH",
        "TRIDOCK_CLUSTER",
        "lower_case",
        "PATH",
        "TRIDOCK_NODE",
        "TRIDOCK_STATE",
    }


AWKWARD = "a  \"b\" 'c' \\d $HOME `e` #f ; & é\ttab\nnext line"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_shells_read_back_what_was_rendered(shell: str) -> None:
    rendered = call("render_shell_environment", env={"AWKWARD": AWKWARD, "EMPTY": ""}).stdout
    script = f'{rendered}\nprintf "%s|%s" "$AWKWARD" "$EMPTY"'
    done = subprocess.run([shell, "-c", script], env={}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{AWKWARD}|"


def test_sshd_gets_one_line_and_no_value_with_a_newline() -> None:
    env = {"A": 'say "hi" \\ there', "TWO": "1\n2", "TRIDOCK_NODE": "n"}
    done = call('unset PATH; shared_environment() { printf \'A=%s\\0TWO=%s\\0\' "$A" "$TWO"; }; render_setenv', env=env)
    assert done.stdout == 'SetEnv SHLVL=1 "A=say \\"hi\\" \\\\ there"\n'


def test_listen_addresses() -> None:
    assert call("listen_addresses").stdout == "0.0.0.0\n::\n"
    listed = call("listen_addresses", env={"TRIDOCK_SSH_LISTEN": "192.0.2.1, 2001:db8::1"})
    assert listed.stdout == "192.0.2.1\n2001:db8::1\n"


def test_the_environments_file_appears_whole_and_closed_to_others(tmp_path: Path) -> None:
    assert call("write_environment", state=tmp_path, env={"A": "1"}).returncode == 0
    assert [file.name for file in tmp_path.iterdir()] == ["environment.sh"]
    assert (tmp_path / "environment.sh").stat().st_mode & 0o777 == 0o600
    assert "export A='1'\n" in (tmp_path / "environment.sh").read_text()


NVIDIAS = """
nvidia-smi >/dev/null || true
export LD_LIBRARY_PATH=/usr/local/cuda/compat/lib.real${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export _CUDA_COMPAT_STATUS="CUDA Driver 'OK'"
echo "to be ignored"
"""


@pytest.fixture
def base_image(tmp_path: Path) -> dict[str, str]:
    """The environment of an image whose base has every bash ask nvidia-smi; ``calls`` counts that."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho call >>{tmp_path}/calls\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "bashrc").write_text(NVIDIAS)
    (tmp_path / "state").mkdir()
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TRIDOCK_BASH_ENV": str(tmp_path / "bashrc"),
        "BASH_ENV": str(tmp_path / "state" / "bash-env.sh"),
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
    }


def test_the_base_images_script_runs_once_and_every_bash_gets_what_it_exports(
    tmp_path: Path, base_image: dict[str, str]
) -> None:
    state = tmp_path / "state"
    compat = "/usr/local/cuda/compat/lib.real:/usr/local/nvidia/lib64"
    shown = 'echo "$LD_LIBRARY_PATH|$_CUDA_COMPAT_STATUS"'
    done = call(f"apply_base_environment; {shown}; write_environment", state=state, env=base_image)
    assert (done.stdout, done.stderr) == (f"{compat}|CUDA Driver 'OK'\n", "")
    assert f"export LD_LIBRARY_PATH='{compat}'" in (state / "environment.sh").read_text()
    for changed, seen in (({}, compat), ({"LD_LIBRARY_PATH": "/mine"}, "/mine")):
        later = subprocess.run(
            ["bash", "-c", shown], env=base_image | changed, capture_output=True, text=True, check=True
        )
        assert later.stdout == f"{seen}|CUDA Driver 'OK'\n"
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_base_image_without_such_a_script_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bash-env.sh").write_text("export OLD=1\n")
    assert call("apply_base_environment", state=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_neither_the_healthcheck_nor_a_command_over_ssh_asks_nvidia_smi(
    tmp_path: Path, base_image: dict[str, str]
) -> None:
    """Not even in a container whose BASH_ENV is the base image's, and where bash reads bashrc for sshd."""
    env = {**base_image, "BASH_ENV": base_image["TRIDOCK_BASH_ENV"], "TRIDOCK_STATE": str(tmp_path / "state")}
    subprocess.run([ROOT / "entrypoint/healthcheck.sh"], env=env, capture_output=True, check=False)
    setenv = call("render_setenv").stdout.split()[1:]
    assert "SHLVL=1" in setenv
    (tmp_path / ".bashrc").write_text(NVIDIAS)
    ssh = {"PATH": base_image["PATH"], "HOME": str(tmp_path), "SSH_CLIENT": "192.0.2.1 1 2", "SHLVL": "1"}
    subprocess.run(["bash", "-c", "true"], env=ssh, check=True)
    assert not (tmp_path / "calls").exists()


def test_an_error_has_the_projects_form() -> None:
    done = call("fail 3 'it is broken' 'this' 'correct it'")
    assert (done.returncode, done.stderr) == (3, "node-1: it is broken; got this; correct it\n")
    assert done.stdout == ""
    assert call("fail 2 'it is broken' '' 'correct it'").stderr == "node-1: it is broken; correct it\n"
    assert call("one_line $'a\\nb\\r\\nc'").stdout == "a | b | c\n"


def test_fab_up_reads_a_nodes_error_as_data() -> None:
    done = call("COMMAND=node; fail 3 'it is broken' 'a \"this\"' 'correct it'")
    assert (done.returncode, done.stderr) == (3, 'node-1: it is broken; got a "this"; correct it\n')
    assert decode(Problem, done.stdout) == Problem("node-1", "it is broken", 'a "this"', "correct it")


def test_a_step_that_fails_without_a_message_is_named() -> None:
    done = call("step() { false; }; step")
    assert done.returncode == 1
    assert "failed: false (exit 1)" in done.stderr


def test_the_pretraining_script_says_what_it_runs(tmp_path: Path) -> None:
    (tmp_path / "tridock").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "tridock").chmod(0o755)
    script = ROOT / "entrypoint/ds_pretrain_gpt2.sh"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRIDOCK_EXPERIMENT": "my.yaml"}
    done = subprocess.run([script, "--nproc", "2"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "train my.yaml --nproc 2\n"
    assert done.stderr == "ds_pretrain_gpt2.sh: tridock train my.yaml --nproc 2\n"
