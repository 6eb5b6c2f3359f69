"""What must not leave the operator's machine unasked: what a folder's links lead to outside of it, and secrets."""

import errno
import os
import re
from fnmatch import translate
from io import BufferedReader
from pathlib import Path
from typing import Final

HEAD_BYTES: Final = 4096
"""The size of a file's beginning in which :func:`secret` looks for a private key."""
_KEY: Final = re.compile(rb"^(-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|PuTTY-User-Key-File-)", re.MULTILINE)
_NAMES: Final = (
    *(".env", ".env.*", ".envrc", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.tfstate"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".git-credentials", ".htpasswd", ".dockercfg"),
    *("credentials", "credentials.json", "client_secret*.json", "service?account*.json", "kaggle.json"),
    *("application_default_credentials.json", "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml"),
    *(".ssh/*", ".gnupg/*", ".aws/*", ".azure/*", ".kube/*", "gcloud/*", ".docker/config.json", "kubeconfig"),
    *("huggingface/token", ".huggingface/*", ".vault-token", ".wandb_api_key", ".s3cfg", ".boto", "rclone.conf"),
)
_SECRETS: Final = re.compile("|".join(translate(f"*/{name}") for name in _NAMES))
_SAMPLES: Final = (".pub", ".example", ".sample", ".template")


def is_inside(real: str, folder: str) -> bool:
    """Whether a place is the folder or below it; both are real paths (:func:`os.path.realpath`)."""
    return f"{real}/".startswith(f"{folder.rstrip('/')}/")


def open_real(real: Path) -> BufferedReader:
    """Opens a real path. Raises :class:`OSError` if a part of it has become a link since then."""
    file = os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    if Path(f"/proc/self/fd/{file.fileno()}").readlink() != real:
        file.close()
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(real))
    return file


def secret(name: str, head: bytes = b"") -> str | None:
    """Returns why a file looks like a secret, by its path below a folder and by its beginning; None if it does not."""
    if _SECRETS.match(f"/{name.lower()}") and not name.endswith(_SAMPLES):
        return "its name"
    return "a private key in it" if _KEY.search(head) else None
