"""The report of this node for the doctor: everything that it can tell without the others."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.node_answers import PROTOCOL
from tridock.node.agent.processes import find_processes
from tridock.node.probes import ports
from tridock.node.probes.accelerators import accelerators, cuda_error
from tridock.node.probes.limits_and_space import limits, space
from tridock.node.probes.ssh_mesh_probe import greet_nodes

_TIMEOUT_S: Final = 5.0


def node_report(workspace: Path, *, quick: bool, ssh_to: list[str]) -> dict[str, object]:
    """Space, and whether CUDA starts; unless ``quick`` also limits, devices, code hashes, a free port and the runs that
    have processes here.

    ``ssh_to`` names nodes to connect to over ssh; only the head is asked for that.
    """
    found: dict[str, object] = {"protocol": PROTOCOL, **space(workspace)}
    found["accelerator"] = os.environ.get("DS_ACCELERATOR")  # what the image was built for: cuda or cpu
    found["cuda_error"] = cuda_error() if found["accelerator"] != "cpu" else None
    if ssh_to:
        found["paths"] = greet_nodes(ssh_to)
    if not quick:
        runs = sorted({process.run_id for process in find_processes()})
        found |= {**limits(), **accelerators(), "code": code(), "runs": runs, **ports.rendezvous_port()}
        found["nccl_ib_disable"] = os.environ.get("NCCL_IB_DISABLE")
    return found


def host_key() -> str | None:
    """The fingerprint of the host key that this node's sshd presents; None if it does not answer."""
    config = Path(run_folder.SSHD_PID).with_name("sshd_config").read_text().splitlines()
    settings = dict(reversed([line.split(" ", 1) for line in config if " " in line]))
    listens = settings["ListenAddress"]
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listens, listens)  # noqa: S104 (a name in a file)
    scan = ["ssh-keyscan", "-T", "3", "-t", "ed25519", "-p", settings["Port"], address]
    key = subprocess.run(scan, capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    if not key.strip():
        return None
    done = subprocess.run(
        ["ssh-keygen", "-l", "-f", "-"], input=key, capture_output=True, timeout=_TIMEOUT_S, check=True
    )
    return done.stdout.decode().split()[1]


def code() -> dict[str, object]:
    """SHA-256 of Tridock's code and of the patched Megatron-LM (None if absent), and the versions of the manifest."""
    ours, megatron = Path(run_folder.CODE), Path(run_folder.MEGATRON)
    try:
        manifest = json.loads((ours / "manifest.json").read_text())
    except (OSError, ValueError):
        manifest = {}
    return {
        "tridock": digest([ours / "tridock", ours / "entrypoint"]),
        "megatron": digest([megatron]),
        "cuda": manifest.get("cuda"),
        "torch": manifest.get("torch"),
        "commit": manifest.get("git_commit"),
    }


def digest(folders: list[Path]) -> str | None:
    """One SHA-256 over the files' paths and contents, without ``__pycache__``; None if there is no file."""
    whole, count = hashlib.sha256(), 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if "__pycache__" in path.parts or not path.is_file():
                continue
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{content}  {folder.name}/{path.relative_to(folder)}\n".encode())
            count += 1
    return whole.hexdigest() if count else None
