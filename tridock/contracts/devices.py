"""GPUs and MIG slices as CUDA counts them: the list of ``nvidia-smi``, and ``CUDA_VISIBLE_DEVICES`` of a rank."""

import re
from collections.abc import Mapping
from typing import Final

from tridock.contracts import environment

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
MIG: Final = "MIG-"
"""How the UUID of a slice begins. A process sees one slice at most."""
_LISTED: Final = re.compile(r"^( *)(?:GPU|MIG) .*\(UUID: ([^)]+)\)$", re.MULTILINE)


def listed_devices(listing: str) -> tuple[str, ...]:
    """The UUIDs of ``nvidia-smi --list-gpus``; a GPU that is divided by MIG counts as its slices."""
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
    """``CUDA_VISIBLE_DEVICES`` of a rank whose node has devices of its own (``TRIDOCK_DEVICES``); else nothing.

    DeepSpeed's launcher sets it to slot numbers, whatever it was before: these are places in the node's list. Of MIG
    slices a rank gets its own alone.
    """
    if environment.DEVICES not in env or VISIBLE not in env:
        return {}
    devices = env[environment.DEVICES].split(",")
    own = [devices[int(slot)] for slot in env[VISIBLE].split(",") if slot.isdecimal() and int(slot) < len(devices)]
    if own and own[0].startswith(MIG):
        rank = int(env.get("LOCAL_RANK", "0"))
        own = own[rank : rank + 1]
    return {VISIBLE: ",".join(own)}
