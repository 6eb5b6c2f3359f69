"""Who gets into a node, and what hostile arguments do on the way to it, with the real sshd, pdsh and DeepSpeed."""

from __future__ import annotations

import json

import pytest

from tests.integration.support import Containers, execute
from tridock.engines import RankProgram
from tridock.launchers.deepspeed import deepspeed_command, environment_file
from tridock.triage import Facts, diagnose

KNOWN = "-o UserKnownHostsFile=/run/tridock/secrets/known_hosts -o StrictHostKeyChecking=yes"
MINE = "-i /run/tridock/secrets/id_ed25519 -o IdentitiesOnly=yes"
STRANGE = "-i /tmp/strange -o IdentitiesOnly=yes"
NO_KEY = "-o PubkeyAuthentication=no -o BatchMode=yes"


@pytest.fixture
def twin(start_twin):  # type: ignore[no-untyped-def]
    return start_twin(4321)


def test_who_does_not_get_in(twin) -> None:  # type: ignore[no-untyped-def]
    """The cluster's own key opens the one account and no other; without it no way is offered, a password least."""
    strange = "ssh-keygen -q -t ed25519 -N '' -f /tmp/strange </dev/null; "
    attempts = {
        "ssh-refused root": f"ssh -F none -p 2222 {KNOWN} {MINE} root@node-2 id",
        "ssh-refused nobody": f"ssh -F none -p 2222 {KNOWN} {MINE} nobody@node-2 id",
        "ssh-refused stranger": f"{strange}ssh -F none -p 2222 {KNOWN} {STRANGE} tridock@node-2 id",
        "ssh-refused password": f"ssh -F none -p 2222 {KNOWN} {NO_KEY} tridock@node-2 id",
        "ssh-host-key": f": >/tmp/none; ssh -F none -p 2222 -o UserKnownHostsFile=/tmp/none "
        f"-o StrictHostKeyChecking=yes {MINE} tridock@node-2 id",
    }
    for name, line in attempts.items():
        done = execute("docker", "exec", "--user", "tridock", twin["node-1"], "sh", "-c", line)
        assert (done.returncode, done.stdout) == (255, ""), f"{name}: {done.stdout}{done.stderr}"
        assert "(publickey)" in done.stderr or name == "ssh-host-key", done.stderr
        assert "password" not in done.stderr
        # The launcher would print the same message, which triage knows.
        assert diagnose(Facts(4, launcher=done.stderr)).rule == name.split()[0], done.stderr
    opened = f"ssh -F none -p 2222 {KNOWN} {MINE} tridock@node-2 id -u"
    done = execute("docker", "exec", "--user", "tridock", twin["node-1"], "sh", "-c", opened)
    assert (done.returncode, done.stdout) == (0, "4321\n"), done.stderr


# As the real one: takes its options and the host off, and gives what is left to a shell, joined by spaces.
SSH = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
HOSTILE = (
    "$(touch /tmp/pwned)", "`touch /tmp/pwned`", "a;touch /tmp/pwned", "two words $(touch /tmp/pwned)", 'quo"te',
    "back\\slash", "%h%n%%", "~", "*", "&", "a\\ \"b$x",
)  # fmt: skip
SHOW = 'import json, os, sys; print("SEEN" + json.dumps([sys.argv[1:], os.environ["V"]]), flush=True)'


def test_hostile_arguments_pass_deepspeed_pdsh_and_a_shell_unchanged(containers: Containers) -> None:
    command = deepspeed_command(
        RankProgram("shown", HOSTILE), {"node-1": [0], "node-2": [0]}, "/tmp/r/hostfile", "127.0.0.1", 29511
    )
    env = '$(touch /tmp/pwned) %h 100% "x" `id` \\'
    script = """
        mkdir -p /tmp/r /tmp/p; cd /tmp/r
        printf '%s' "$1" >/tmp/p/ssh; chmod +x /tmp/p/ssh
        printf '%s\\n' "$2" >shown.py
        printf '%s' "$3" >env
        printf 'node-1 slots=1\\nnode-2 slots=1\\n' >hostfile
        export PATH=/tmp/p:$PATH PYTHONPATH=/tmp/r DS_ENV_FILE=/tmp/r/env DS_ACCELERATOR=cpu PDSH_RCMD_TYPE=ssh
        eval "$4"
        ls /tmp
    """
    done = containers.run("bash", "-c", script, "bash", SSH, SHOW, environment_file({"V": env}), command.render())
    seen = [json.loads(line.partition("SEEN")[2]) for line in done.stdout.splitlines() if "SEEN" in line]
    assert seen == [[list(HOSTILE), env]] * 2, done.stdout + done.stderr
    assert "pwned" not in done.stdout.splitlines()[-3:]
