"""A cluster's keys, and the files of a node's ``/run/tridock/secrets``: keys, ``known_hosts``, ``ssh_config``. Pure.

One client key and one host key per node, all ed25519 in OpenSSH's format. The objects hold private keys; their repr
shows only fingerprints.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from tridock.cluster.settings import Cluster, ClusterNode
from tridock.contracts import cluster_ssh, run_folder


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """An ed25519 key: ``private`` is the content of a key file, ``public`` is ``ssh-ed25519 AAAA…``."""

    private: bytes
    public: str

    @classmethod
    def generate(cls) -> KeyPair:
        key = Ed25519PrivateKey.generate()
        return cls(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), _public(key))

    @classmethod
    def from_private(cls, private: bytes) -> KeyPair:
        """Returns the pair of a private key file. Raises ValueError unless it is ed25519 without a passphrase."""
        try:
            key = load_ssh_private_key(private, password=None)
        except (UnsupportedAlgorithm, TypeError) as error:  # TypeError: it has a passphrase
            raise ValueError(str(error)) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"not an ed25519 key but {type(key).__name__}")
        # The bytes are kept: OpenSSH's format has a random check number, so serializing again changes them.
        return cls(private, _public(key))

    @property
    def fingerprint(self) -> str:
        """The fingerprint as ``ssh-keygen -l`` shows it: ``SHA256:…``."""
        blob = base64.b64decode(self.public.split()[1])
        return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"KeyPair({self.fingerprint})"


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The client key, which every node holds, and each node's host key."""

    client: KeyPair
    hosts: Mapping[str, KeyPair]

    @classmethod
    def generate(cls, nodes: Iterable[str]) -> ClusterKeys:
        return cls(KeyPair.generate(), {name: KeyPair.generate() for name in nodes})

    def for_nodes(self, nodes: Iterable[str]) -> ClusterKeys:
        """Returns keys for exactly these nodes: keeps existing ones, creates missing ones, drops the rest."""
        return ClusterKeys(self.client, {name: self.hosts.get(name) or KeyPair.generate() for name in nodes})

    def to_json(self) -> bytes:
        """Serializes the keys for the operator's disk, private keys included."""
        fields = {
            "client": self.client.private.decode(),
            "hosts": {name: pair.private.decode() for name, pair in self.hosts.items()},
        }
        return json.dumps(fields, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> ClusterKeys:
        """Reads what :meth:`to_json` wrote. Raises ValueError for anything else."""
        try:
            fields = json.loads(content)
            hosts = {str(name): KeyPair.from_private(text.encode()) for name, text in fields["hosts"].items()}
            return cls(KeyPair.from_private(fields["client"].encode()), hosts)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None


CLIENT_KEY: Final = "id_ed25519"
CLIENT_PUBLIC: Final = "id_ed25519.pub"
AUTHORIZED_KEYS: Final = "authorized_keys"
HOST_KEY: Final = "ssh_host_ed25519_key"
HOST_PUBLIC: Final = "ssh_host_ed25519_key.pub"
KNOWN_HOSTS: Final = "known_hosts"
SSH_CONFIG: Final = "ssh_config"
NODE_FILES: Final = (CLIENT_KEY, CLIENT_PUBLIC, AUTHORIZED_KEYS, HOST_KEY, HOST_PUBLIC, KNOWN_HOSTS, SSH_CONFIG)


def node_files(cluster: Cluster, keys: ClusterKeys) -> Callable[[str], dict[str, bytes]]:
    """Returns the function from a node to its secrets folder's files, by name. Only the host key differs."""
    comment = f"tridock-{cluster.name}"
    common = {
        CLIENT_KEY: keys.client.private,
        CLIENT_PUBLIC: f"{keys.client.public} {comment}\n".encode(),
        AUTHORIZED_KEYS: authorized_keys(cluster, keys).encode(),
        KNOWN_HOSTS: known_hosts(cluster, keys).encode(),
        SSH_CONFIG: ssh_config(cluster).encode(),
    }

    def files_of(node: str) -> dict[str, bytes]:
        host_key = keys.hosts[node]
        own = {HOST_KEY: host_key.private, HOST_PUBLIC: f"{host_key.public} {comment}-{node}\n".encode()}
        return {**common, **own}

    return files_of


def authorized_keys(cluster: Cluster, keys: ClusterKeys) -> str:
    """Returns authorized_keys: the cluster's key may run commands, with a terminal if requested, and nothing else."""
    return f"restrict,pty {keys.client.public} tridock-{cluster.name}\n"


def known_hosts(cluster: Cluster, keys: ClusterKeys) -> str:
    """Returns known_hosts: every node's host key, if it has one yet, under every name that other nodes use."""
    return "".join(
        f"{','.join(_known_names(cluster, node))} {keys.hosts[node.name].public}\n"
        for node in cluster.nodes
        if node.name in keys.hosts
    )


def _known_names(cluster: Cluster, node: ClusterNode) -> Mapping[str, None]:
    port = cluster.settings.ssh_port
    # ssh looks up [name]:port, other programs the bare name; both in lower case.
    names = [name.lower() for name in _names(node)]
    return dict.fromkeys(form for name in names for form in (name, f"[{name}]:{port}"))


def _names(node: ClusterNode) -> Mapping[str, None]:
    return dict.fromkeys((node.name, node.host, node.address))


def ssh_config(cluster: Cluster, secrets: str = run_folder.SECRETS) -> str:
    """Returns the ssh_config with which a node reaches the others. Omits hosts outside the cluster.

    ``secrets`` is the folder with the node's files.
    """
    # % starts an escape in HostName; that of a zone (fe80::1%eth0) is literal.
    addresses = {" ".join(_names(node)): node.address.replace("%", "%%") for node in cluster.nodes}
    blocks = [f"Host {names}\n    HostName {address}\n" for names, address in addresses.items()]
    everyone = " ".join(addresses)
    common = {
        "Port": str(cluster.settings.ssh_port),
        "User": run_folder.USER,
        "IdentityFile": f"{secrets}/{CLIENT_KEY}",
        "UserKnownHostsFile": f"{secrets}/{KNOWN_HOSTS}",
        **cluster_ssh.CONFIG,
    }
    blocks.append(f"Host {everyone}\n" + "".join(f"    {name} {value}\n" for name, value in common.items()))
    return "\n".join(blocks)
