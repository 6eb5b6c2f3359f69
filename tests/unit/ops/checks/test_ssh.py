"""What ssh says on the way to a node, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.ops.checks.lab import make_cluster, shown
from tridock.contracts.node_answers import SshAnswer
from tridock.ops.checks.finding import KEYS
from tridock.ops.checks.ssh import ssh_findings

SHOWN = "SHA256:rSayVbbB7JHBUoGYtEFv9PW70wKPAPMjfhd2l94v3uI"
CHANGED = f"""\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
The fingerprint for the ED25519 key sent by the remote host is
{SHOWN}.
Please contact your system administrator.
Host key for [192.0.2.2]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
FOREIGN = (
    "end the sshd that holds the port there, choose another ssh_port in the settings, "
    "or give the node's own address (nodes.host-2.address)"
)
KEYS_AGAIN = "give all nodes the cluster's keys again: tridock keys --hosts "
ADDRESS = "nodes.host-2.address in the settings"


def nobody(node: str) -> str | None:
    """No node is asked what it shows."""
    raise AssertionError(f"{node} was asked")


def judge(
    folder: Path,
    out: str = "",
    err: str = "",
    code: int | None = 255,
    host_key_of: Callable[[str], str | None] = nobody,
) -> list[str]:
    cluster = make_cluster(folder, nodes={"host-2": {"address": "192.0.2.2"}})
    return shown(ssh_findings(cluster, {"host-2": SshAnswer(code, out, err)}, host_key_of))


def test_a_node_of_this_cluster_that_answers_is_well(tmp_path: Path) -> None:
    assert judge(tmp_path, "tridock-node lab host-2\n", code=0) == []
    assert judge(tmp_path, "Welcome!\ntridock-node lab host-2\n", code=0) == []


def test_another_cluster_or_another_node_is_named(tmp_path: Path) -> None:
    what = "fail  host-2: another node answers the head's ssh at 192.0.2.2 port 2222"
    todo = "give its own address (nodes.host-2.address in the settings)"
    for cluster, node in (("rack", "host-2"), ("lab", "host-1")):
        expected = [f"{what}; got node {node} of cluster {cluster}; {todo}"]
        assert judge(tmp_path, f"tridock-node {cluster} {node}\n", code=0) == expected


@pytest.mark.parametrize(
    ("out", "code"), [("tridock-node  \n", 0), ("tridock-node  \n", 127), ("This is a switch\n", 0)]
)
def test_a_hosts_own_sshd_that_lets_us_in_is_recognised(out: str, code: int, tmp_path: Path) -> None:
    assert judge(tmp_path, out, code=code) == [
        "fail  host-2: an sshd that is not the node's answers at 192.0.2.2 port 2222; "
        f"got it let us in, and is no node; {FOREIGN}"
    ]


def test_a_hosts_own_sshd_with_a_key_of_its_own_is_recognised(tmp_path: Path) -> None:
    assert judge(tmp_path, err=CHANGED, host_key_of=lambda _: "SHA256:ofthenode") == [
        f"fail  host-2: an sshd that is not the node's answers at 192.0.2.2 port 2222; got host key {SHOWN}; {FOREIGN}"
    ]
    offer = "Unable to negotiate with 192.0.2.2 port 2222: no matching host key type found. Their offer: ssh-rsa\n"
    assert judge(tmp_path, err=offer) == [
        f"fail  host-2: an sshd that is not the node's answers at 192.0.2.2 port 2222; got {offer.strip()}; {FOREIGN}"
    ]
    closed = "kex_exchange_identification: Connection closed by remote host\nConnection closed by 192.0.2.2 port 2222\n"
    assert judge(tmp_path, err=closed) == [
        "fail  host-2: an sshd that is not the node's answers at 192.0.2.2 port 2222; "
        f"got Connection closed by 192.0.2.2 port 2222; {FOREIGN}"
    ]


def test_the_nodes_own_sshd_with_another_key_wants_keys_again(tmp_path: Path) -> None:
    assert judge(tmp_path, err=CHANGED, host_key_of=lambda _: SHOWN) == [
        f"fail  host-2: shows another host key than the head has on file; got {SHOWN}; {KEYS_AGAIN}{tmp_path}/lab"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "No ED25519 host key is known for [192.0.2.2]:2222 and you have requested strict checking.\n"
        "Host key verification failed.",
        "tridock@192.0.2.2: Permission denied (publickey).",
    ],
)
def test_keys_that_are_not_known_can_be_given_again(text: str, tmp_path: Path) -> None:
    last = text.splitlines()[-1].rstrip(".")
    assert judge(tmp_path, err=text) == [
        "fail  host-2: does not trust the head's ssh, or is not trusted, at 192.0.2.2 port 2222; "
        f"got {last}; {KEYS_AGAIN}{tmp_path}/lab"
    ]
    said = {"host-2": SshAnswer(255, "", text)}
    assert [it.remedy for it in ssh_findings(make_cluster(tmp_path), said, nobody)] == [KEYS]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ssh: connect to host 192.0.2.2 port 2222: Connection refused",
            "nothing listens at 192.0.2.2 port 2222 for host-1; got {text}; "
            f"see `listen` in the settings and what listens there (ss -ltn), or give its address ({ADDRESS})",
        ),
        (
            "ssh: connect to host 192.0.2.2 port 2222: Connection timed out",
            "is not reached from host-1 at 192.0.2.2 port 2222; got {text}; let host-1 through to it (firewall), "
            f"or give an address on a network that they share ({ADDRESS})",
        ),
        (
            "ssh: connect to host 192.0.2.2 port 2222: No route to host",
            "is not reached from host-1 at 192.0.2.2 port 2222; got {text}; let host-1 through to it (firewall), "
            f"or give an address on a network that they share ({ADDRESS})",
        ),
        (
            "Connection timed out during banner exchange",
            "what listens at 192.0.2.2 port 2222 says nothing; got {text}; "
            "recreate its container: tridock down, then tridock up",
        ),
        (
            "ssh: Could not resolve hostname host-2: Name or service not known",
            f"its name leads nowhere on host-1; got {{text}}; give its address ({ADDRESS})",
        ),
        (
            "Bad configuration option: nonsense",
            "is not reached from host-1 over ssh at 192.0.2.2 port 2222; got {text}; "
            "try it there: docker exec in host-1's container, ssh host-2",
        ),
    ],
)
def test_sshs_own_message_and_the_one_fix(text: str, expected: str, tmp_path: Path) -> None:
    assert judge(tmp_path, err=f"{text}\n") == [f"fail  host-2: {expected.format(text=text)}"]


def test_an_sshd_that_never_ends(tmp_path: Path) -> None:
    assert judge(tmp_path, code=None) == [
        "fail  host-2: did not answer the head's ssh at 192.0.2.2 port 2222 in time; see what delays its sshd"
    ]


def test_a_node_that_answers_and_whose_programs_fail(tmp_path: Path) -> None:
    text = "/opt/venv/bin/python: No module named tridock\n"
    assert judge(tmp_path, "tridock-node lab host-2\n", text, 1) == [
        "fail  host-2: its commands fail over ssh; got /opt/venv/bin/python: No module named tridock; "
        "recreate its container: tridock down, then tridock up"
    ]
