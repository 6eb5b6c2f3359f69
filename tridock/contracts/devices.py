"""GPUs and MIG slices as CUDA numbers them: ``nvidia-smi``'s list, and a rank's ``CUDA_VISIBLE_DEVICES``."""

import re
from collections.abc import Mapping
from typing import Final

from tridock.contracts import environment

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
MIG: Final = "MIG-"
"""Prefix of a MIG slice's UUID. A process sees at most one slice."""
_LISTED: Final = re.compile(r"^( *)(?:GPU|MIG) .*\(UUID: ([^)]+)\)$", re.MULTILINE)


def listed_devices(listing: str) -> tuple[str, ...]:
    """Returns the UUIDs in the output of ``nvidia-smi --list-gpus``. A GPU in MIG mode is listed as its slices."""
    found: list[str] = []
    whole = ""
    for indent, uuid in _LISTED.findall(listing):
        if not indent:
            whole = uuid
        elif found[-1:] == [whole]:
            found.pop()
        found.append(uuid)
    return tuple(found)


def rank_devices(env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``CUDA_VISIBLE_DEVICES`` for a rank on a node with a device list (``TRIDOCK_DEVICES``), else nothing.

    DeepSpeed's launcher overwrites the variable with slot numbers, which are indices into the node's list. With MIG
    each rank gets only its own slice.
    """
    if environment.DEVICES not in env or VISIBLE not in env:
        return {}
    devices = env[environment.DEVICES].split(",")
    own = [devices[int(slot)] for slot in env[VISIBLE].split(",") if slot.isdecimal() and int(slot) < len(devices)]
    if own and own[0].startswith(MIG):
        rank = int(env.get("LOCAL_RANK", "0"))
        own = own[rank : rank + 1]
    return {VISIBLE: ",".join(own)}
