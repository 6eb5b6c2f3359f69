"""The environment variables of Tridock; the scripts in ``entrypoint/`` repeat some names, and a test compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

# In a container, set when it is started.
CLUSTER: Final = "TRIDOCK_CLUSTER"
NODE: Final = "TRIDOCK_NODE"
UID: Final = "TRIDOCK_UID"
GID: Final = "TRIDOCK_GID"
SSH_PORT: Final = "TRIDOCK_SSH_PORT"
SSH_LISTEN: Final = "TRIDOCK_SSH_LISTEN"
# For containers of the twin; Compose reads them.
IMAGE: Final = "TRIDOCK_IMAGE"
# For a container's scripts: folders to use instead of /run/tridock/state and /run/tridock/secrets.
STATE: Final = "TRIDOCK_STATE"
SECRETS: Final = "TRIDOCK_SECRETS"
# In an image: BASH_ENV of its base image, which the entrypoint runs once.
BASH_ENV: Final = "TRIDOCK_BASH_ENV"
# In an image or for a run: the folder to use instead of /opt/megatron-v1.1.5.
MEGATRON: Final = "TRIDOCK_MEGATRON"
# For the scripts with the old names: the experiment to start.
EXPERIMENT: Final = "TRIDOCK_EXPERIMENT"
# Set by the operator: the default hostfile.
HOSTS: Final = "TRIDOCK_HOSTS"
# For `tridock data fetch`: folders and URLs to try first, separated by spaces.
DATA_MIRRORS: Final = "TRIDOCK_DATA_MIRRORS"
# On a node: its list of GPUs, as in CUDA_VISIBLE_DEVICES. The launcher's slot numbers are indices into it.
DEVICES: Final = "TRIDOCK_DEVICES"
# Only in the processes of a run.
RUN_ID: Final = "TRIDOCK_RUN_ID"
WORLD_SIZE: Final = "TRIDOCK_WORLD_SIZE"
# In a run of your own program: the run's folder.
RUN_FOLDER: Final = "TRIDOCK_RUN_FOLDER"
# In the processes of one `tridock exec`.
EXEC: Final = "TRIDOCK_EXEC"
# For `tridock bench`: the run alternates with a bare PyTorch loop, `<warm-up steps>,<steps per turn>`.
TURNS: Final = "TRIDOCK_TURNS"
# DeepSpeed's own variable: the timeout of a collective of torch, in whole minutes.
COLLECTIVE_TIMEOUT: Final = "DEEPSPEED_TIMEOUT"
# DeepSpeed's log level.
DEEPSPEED_LOG_LEVEL: Final = "TRIDOCK_DEEPSPEED_LOG_LEVEL"

# Set by the operator: the token in the address of `tridock watch`; random by default.
WATCH_TOKEN: Final = "TRIDOCK_WATCH_TOKEN"  # noqa: S105 (a name)
# On a machine: a Python with the trackers' libraries, if the usual ones lack them.
TRACKERS_PYTHON: Final = "TRIDOCK_TRACKERS_PYTHON"

OF_A_RUN: Final = (RUN_ID, WORLD_SIZE, RUN_FOLDER)
"""Never part of a node's environment: ``entrypoint.sh`` leaves them out for sshd and login shells."""
OF_A_NODE: Final = (NODE, SSH_LISTEN, UID, GID, DEVICES)
"""Variables that differ between nodes by design."""

RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables in which launchers pass the rank: torchrun, deepspeed, accelerate; Open MPI; MPICH.

SLURM_PROCID is missing because it is also set for launchers inside a job, where Tridock starts one task per node.
"""
_WORLD_SIZES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which the same launchers pass the number of ranks."""


def rank_of(variables: Mapping[str, str]) -> int | None:
    """Returns the rank of a process with these environment variables, or None if it is not a rank."""
    return _first(variables, RANKS)


def world_size_of(variables: Mapping[str, str]) -> int:
    """Returns the number of ranks in the world of such a process; 0 if it is not said."""
    return _first(variables, _WORLD_SIZES) or 0


def _first(variables: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((int(variables[name]) for name in names if variables.get(name, "").isdigit()), None)
