"""The environment variables of Tridock; the scripts in ``entrypoint/`` repeat some names, and a test compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Of a container, set where it is started.
CLUSTER: Final = "TRIDOCK_CLUSTER"
NODE: Final = "TRIDOCK_NODE"
UID: Final = "TRIDOCK_UID"
GID: Final = "TRIDOCK_GID"
SSH_PORT: Final = "TRIDOCK_SSH_PORT"
SSH_LISTEN: Final = "TRIDOCK_SSH_LISTEN"
# Of a container of the twin: what Compose reads.
IMAGE: Final = "TRIDOCK_IMAGE"
# Of a container, for its own scripts: other folders than /run/tridock/state and /run/tridock/secrets.
STATE: Final = "TRIDOCK_STATE"
SECRETS: Final = "TRIDOCK_SECRETS"
# Of an image: BASH_ENV of its base image, which the entrypoint runs once.
BASH_ENV: Final = "TRIDOCK_BASH_ENV"
# Of an image or a run: another folder than /opt/megatron-v1.1.5.
MEGATRON: Final = "TRIDOCK_MEGATRON"
# For the scripts with the old names: the experiment that they start.
EXPERIMENT: Final = "TRIDOCK_EXPERIMENT"
# Of the operator: the hostfile where no option names one.
HOSTS: Final = "TRIDOCK_HOSTS"
# For `tridock data fetch`: where it looks first, folders and addresses, separated by spaces.
DATA_MIRRORS: Final = "TRIDOCK_DATA_MIRRORS"
# Of a node: its own list of GPUs, as in CUDA_VISIBLE_DEVICES. The launcher's slot numbers are places in it.
DEVICES: Final = "TRIDOCK_DEVICES"
# Of a run's processes, and of nothing else.
RUN_ID: Final = "TRIDOCK_RUN_ID"
WORLD_SIZE: Final = "TRIDOCK_WORLD_SIZE"
# Of a run of the user's own program: the run's folder.
RUN_FOLDER: Final = "TRIDOCK_RUN_FOLDER"
# For `tridock bench`: the run takes turns with a bare loop of PyTorch, `<steps of warm-up>,<steps of a turn>`.
TURNS: Final = "TRIDOCK_TURNS"
# The level of DeepSpeed's own log lines.
DEEPSPEED_LOG_LEVEL: Final = "TRIDOCK_DEEPSPEED_LOG_LEVEL"

# Of the operator: the token in the address of `tridock watch`, which is random where it is not set.
WATCH_TOKEN: Final = "TRIDOCK_WATCH_TOKEN"  # noqa: S105 (a name)
# Of a machine: a Python that has the trackers' libraries, where the usual ones lack them.
TRACKERS_PYTHON: Final = "TRIDOCK_TRACKERS_PYTHON"

OF_A_RUN: Final = (RUN_ID, WORLD_SIZE, RUN_FOLDER)
"""Never part of a node's environment: ``entrypoint.sh`` leaves them out for sshd and login shells."""
OF_A_NODE: Final = (NODE, SSH_LISTEN, UID, GID, DEVICES)
"""Differ from node to node by design."""

RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""What launchers call a process's rank: torchrun, deepspeed, accelerate; Open MPI; MPICH.

Not SLURM_PROCID, which launchers inside a job have, too: a step of Tridock's has one task per node.
"""


def rank_of(variables: Mapping[str, str]) -> int | None:
    """The rank of a process with these variables; None for one that is no rank."""
    numbers = (int(variables[name]) for name in RANKS if variables.get(name, "").isdigit())
    return next(numbers, None)
