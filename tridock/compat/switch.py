"""What a rank calls before it imports the code that needs it."""

from __future__ import annotations

from tridock.compat import apex, cuda, old_names


def install(device_type: str, local_world_size: int) -> list[str]:
    """Puts stand-ins where something is missing on this machine; says which, one a line.

    Call it after torch and DeepSpeed are imported, so that they do not take a stand-in for the real thing.
    """
    replaced = old_names.restore()
    if device_type != "cuda":
        replaced += cuda.map_to_cpu(local_world_size)
    replaced += apex.stand_in(device_type)
    return replaced
