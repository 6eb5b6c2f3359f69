"""Key material and ssh's files: looked at with OpenSSH's own programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tridock.cluster.keys import NODE_FILES, ClusterKeys, KeyPair, known_hosts, node_files, ssh_config
from tridock.cluster.settings import Cluster, load_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "lab"
    path.write_text("Node-1 slots=2\n192.0.2.2 slots=1\nfe80::1%eth0 slots=4\n")
    path.with_name("lab.yaml").write_text("ssh_port: 2300\nnodes: {Node-1: {address: 198.51.100.1}}\n")
    return load_cluster(path)


def private_file(folder: Path, content: bytes) -> Path:
    path = folder / "key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path


def test_openssh_reads_our_keys(tmp_path: Path) -> None:
    pair = KeyPair.generate()
    path = private_file(tmp_path, pair.private)
    assert subprocess.check_output(["ssh-keygen", "-y", "-f", path], text=True).strip() == pair.public
    listed = subprocess.check_output(["ssh-keygen", "-l", "-f", path], text=True).split()
    assert (listed[0], listed[1]) == ("256", pair.fingerprint)


def test_we_read_opensshs_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "x", "-f", path], check=True)
    pair = KeyPair.from_private(path.read_bytes())
    assert pair.public == " ".join(path.with_suffix(".pub").read_text().split()[:2])
    assert pair.private == path.read_bytes()


def test_other_keys_are_refused(tmp_path: Path) -> None:
    rsa = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    with pytest.raises(ValueError, match=r"^not an ed25519 key but RSAPrivateKey$"):
        KeyPair.from_private(rsa)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", tmp_path / "key"], check=True)
    for content in (b"", b"rubbish", KeyPair.generate().private[:200], (tmp_path / "key").read_bytes()):
        with pytest.raises(ValueError, match=r".+"):
            KeyPair.from_private(content)


def test_nothing_prints_a_private_key() -> None:
    keys = ClusterKeys.generate(["a", "b"])
    for shown in (repr(keys), str(keys), f"{keys.client}", repr(keys.hosts), repr({"x": [keys]})):
        assert "PRIVATE" not in shown
        for pair in (keys.client, *keys.hosts.values()):
            secret = pair.private.splitlines()[2].decode()
            assert secret not in shown
    assert repr(keys.client) == f"KeyPair({keys.client.fingerprint})"


def test_nodes_come_and_go() -> None:
    keys = ClusterKeys.generate(["a", "b"])
    changed = keys.for_nodes(["b", "c"])
    assert changed.client == keys.client
    assert changed.hosts["b"] == keys.hosts["b"]
    assert list(changed.hosts) == ["b", "c"]
    assert changed.for_nodes(["b", "c"]) == changed


def test_every_key_is_another() -> None:
    keys = ClusterKeys.generate(f"n{number}" for number in range(20))
    assert len({pair.public for pair in (keys.client, *keys.hosts.values())}) == 21


def test_json_round_trip() -> None:
    keys = ClusterKeys.generate(["a"])
    assert ClusterKeys.from_json(keys.to_json()) == keys


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"client": 3, "hosts": {}}', b'{"client": "x", "hosts": {}}'])
def test_json_of_another_kind_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ClusterKeys.from_json(content)


def test_a_nodes_files(cluster: Cluster) -> None:
    keys = ClusterKeys.generate(node.name for node in cluster.nodes)
    files, other = map(node_files(cluster, keys), ("Node-1", "192.0.2.2"))
    assert sorted(files) == sorted(other) == sorted(NODE_FILES)
    assert files["authorized_keys"].decode() == f"restrict,pty {keys.client.public} tridock-lab\n"
    assert files["id_ed25519"] == keys.client.private
    assert files["ssh_host_ed25519_key"] == keys.hosts["Node-1"].private
    assert files["ssh_host_ed25519_key.pub"].decode() == f"{keys.hosts['Node-1'].public} tridock-lab-Node-1\n"
    assert other["ssh_host_ed25519_key"] not in files.values()


@pytest.mark.parametrize(
    ("called", "node"),
    [
        ("[node-1]:2300", "Node-1"),
        ("[Node-1]:2300", "Node-1"),
        ("[198.51.100.1]:2300", "Node-1"),
        ("node-1", "Node-1"),
        ("[192.0.2.2]:2300", "192.0.2.2"),
        ("[fe80::1%eth0]:2300", "ip6-fe80--1-eth0"),
        ("[ip6-fe80--1-eth0]:2300", "ip6-fe80--1-eth0"),
    ],
)
def test_known_hosts_has_every_name(cluster: Cluster, tmp_path: Path, called: str, node: str) -> None:
    keys = ClusterKeys.generate(node.name for node in cluster.nodes)
    path = tmp_path / "known_hosts"
    path.write_text(known_hosts(cluster, keys))
    found = subprocess.check_output(["ssh-keygen", "-F", called, "-f", path], text=True)
    assert found.splitlines()[-1].endswith(keys.hosts[node].public)


def ssh_g(path: Path, host: str) -> dict[str, str]:
    text = subprocess.check_output(["ssh", "-G", "-F", path, host], text=True)
    return dict(line.split(" ", 1) for line in text.splitlines() if " " in line)


@pytest.mark.parametrize(
    ("called", "address"),
    [
        ("Node-1", "198.51.100.1"),
        ("198.51.100.1", "198.51.100.1"),
        ("192.0.2.2", "192.0.2.2"),
        ("ip6-fe80--1-eth0", "fe80::1%eth0"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_what_ssh_makes_of_the_configuration(cluster: Cluster, tmp_path: Path, called: str, address: str) -> None:
    path = tmp_path / "ssh_config"
    path.write_text(ssh_config(cluster))
    wanted = {
        "hostname": address,
        "port": "2300",
        "user": "tridock",
        "identityfile": "/run/tridock/secrets/id_ed25519",
        "identitiesonly": "yes",
        "identityagent": "none",
        "userknownhostsfile": "/run/tridock/secrets/known_hosts",
        "globalknownhostsfile": "none",
        "stricthostkeychecking": "true",
        "updatehostkeys": "false",
        "hostkeyalgorithms": "ssh-ed25519",
        "preferredauthentications": "publickey",
        "batchmode": "yes",
        "connecttimeout": "10",
        "connectionattempts": "2",
        "serveraliveinterval": "15",
        "serveralivecountmax": "4",
        "controlmaster": "false",
        "forwardagent": "no",
        "loglevel": "ERROR",
    }
    got = ssh_g(path, called)
    assert {key: got.get(key) for key in wanted} == wanted
    assert got.get("controlpath", "none") == "none"


def test_hosts_outside_the_cluster_keep_the_defaults(cluster: Cluster, tmp_path: Path) -> None:
    path, empty = tmp_path / "ssh_config", tmp_path / "empty"
    path.write_text(ssh_config(cluster))
    empty.touch()
    assert ssh_g(path, "github.com") == ssh_g(empty, "github.com")
