"""Key material of a cluster: one client key, one host key a node, all ed25519 in OpenSSH's format. Pure.

The objects hold private keys, so what prints them shows fingerprints only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """An ed25519 key: ``private`` as the content of a key file, ``public`` as ``ssh-ed25519 AAAA…``."""

    private: bytes
    public: str

    @classmethod
    def generate(cls) -> KeyPair:
        """A new key."""
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def from_private(cls, private: bytes) -> KeyPair:
        """The pair of a private key file. Raises ValueError for anything but an ed25519 key without a passphrase."""
        try:
            key = load_ssh_private_key(private, password=None)
        except (UnsupportedAlgorithm, TypeError) as error:  # TypeError: it has a passphrase
            raise ValueError(str(error)) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"not an ed25519 key but {type(key).__name__}")
        # The bytes stay as they are: written anew they would differ each time, by the format's random check number.
        return cls(private, cls._of(key).public)

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> KeyPair:
        return cls(
            key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
            key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
        )

    @property
    def fingerprint(self) -> str:
        """As ``ssh-keygen -l`` shows it: ``SHA256:…``."""
        blob = base64.b64decode(self.public.split()[1])
        return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"KeyPair({self.fingerprint})"


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The client key that every node holds, and each node's own host key."""

    client: KeyPair
    hosts: Mapping[str, KeyPair]

    @classmethod
    def generate(cls, nodes: Iterable[str]) -> ClusterKeys:
        """New keys for these nodes."""
        return cls(KeyPair.generate(), {name: KeyPair.generate() for name in nodes})

    def for_nodes(self, nodes: Iterable[str]) -> ClusterKeys:
        """Keys for exactly these nodes: known ones keep theirs, new ones get one, the others' are dropped."""
        return ClusterKeys(self.client, {name: self.hosts.get(name) or KeyPair.generate() for name in nodes})

    def to_json(self) -> bytes:
        """For the operator's disk; holds the private keys."""
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
