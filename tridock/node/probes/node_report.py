"""The doctor's report of this node: everything that needs no other node."""

import hashlib
import os
import resource
import subprocess
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.node_answers import PROTOCOL, Code, HostKey, NodeReport, QuickReport
from tridock.contracts.records import read_object
from tridock.node.agent.processes import find_processes
from tridock.node.probes import ports
from tridock.node.probes.accelerators import CudaDriver, accelerators, cuda_driver, infiniband
from tridock.node.probes.build_locks import stale_locks
from tridock.node.probes.interfaces import network
from tridock.node.probes.limits_and_space import cores, shared_memory, soft_limit, space, write_error
from tridock.node.probes.ssh_mesh_probe import greet_nodes

_TIMEOUT_S: Final = 5.0
_PYTHON: Final = (
    "import importlib.util as i, sys; print('%d.%d' % sys.version_info[:2], i.find_spec('torch') is not None)"
)


def node_report(workspace: Path, *, quick: bool, ssh_to: list[str]) -> QuickReport:
    """Returns this node's report; ``ssh_to`` names nodes to connect to over ssh, for the head only."""
    runs, built_for = workspace / "runs", os.environ.get("DS_ACCELERATOR")
    cuda = CudaDriver() if built_for == "cpu" else cuda_driver()
    checked_always: dict[str, Any] = {
        "protocol": PROTOCOL,
        "shm": shared_memory(),
        "disk": space(runs),
        "unwritable": write_error(runs),
        "built_for": built_for,
        "cuda_error": cuda.error,
        "capabilities": cuda.capabilities,
        "architectures": tuple(_manifest().get("torch_architectures", ())),
        "ssh": greet_nodes(ssh_to),
        "network": network(),
    }
    if quick:
        return QuickReport(**checked_always)
    return NodeReport(
        **checked_always,
        memlock=soft_limit(resource.RLIMIT_MEMLOCK),
        files=soft_limit(resource.RLIMIT_NOFILE),
        cores=cores(),
        accelerators=accelerators(),
        infiniband=infiniband(),
        code=code(),
        runs=tuple(sorted({process.run_id for process in find_processes()})),
        rendezvous=ports.rendezvous_port(),
        nccl_ib_disable=os.environ.get("NCCL_IB_DISABLE"),
        no_reduction=no_reduction(),
        build_locks=stale_locks(),
    )


def no_reduction() -> str | None:
    """Returns why the Python of your own image cannot run the all-reduce, or None; imports nothing."""
    try:
        done = subprocess.run(
            ["python", "-c", _PYTHON], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return "no python on PATH"
    except subprocess.TimeoutExpired:
        return None  # a timeout does not prove that it is missing
    version, _, torch = done.stdout.strip().partition(" ")
    if torch == "False":
        return f"no torch in its Python {version}"
    is_old = version and tuple(map(int, version.split("."))) < (3, 11)
    return f"Python {version}, and the all-reduce needs 3.11" if is_old else None


def host_key() -> HostKey:
    """Returns the host key that this node's sshd presents."""
    config = Path(run_folder.SSHD_PID).with_name("sshd_config").read_text().splitlines()
    settings = dict(reversed([line.split(" ", 1) for line in config if " " in line]))
    listens = settings["ListenAddress"]
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listens, listens)  # noqa: S104 (a name in a file)
    scan = ["ssh-keyscan", "-T", "3", "-t", "ed25519", "-p", settings["Port"], address]
    key = subprocess.run(scan, capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    if not key.strip():
        return HostKey(None)
    done = subprocess.run(
        ["ssh-keygen", "-l", "-f", "-"], input=key, capture_output=True, timeout=_TIMEOUT_S, check=True
    )
    return HostKey(done.stdout.decode().split()[1])


def code() -> Code:
    """Returns the hashes of this node's code, and CUDA's version in the image's manifest."""
    ours = Path(run_folder.CODE)
    return Code(
        tridock=digest([ours / "tridock", ours / "entrypoint"]),
        megatron=digest([Path(run_folder.MEGATRON)]),
        cuda=_manifest().get("cuda"),
    )


def _manifest() -> dict[str, Any]:
    """Returns the image's manifest."""
    return read_object(Path(run_folder.CODE) / "manifest.json")


def digest(folders: list[Path]) -> str | None:
    """Returns one SHA-256 over the files' paths and contents, without ``__pycache__``; None if there is no file."""
    whole, count = hashlib.sha256(), 0
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if "__pycache__" in path.parts or not path.is_file():
                continue
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{content}  {folder.name}/{path.relative_to(folder)}\n".encode())
            count += 1
    return whole.hexdigest() if count else None
