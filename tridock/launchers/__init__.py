"""What starts a run: the command line of its ranks, the first files of its folder, how its nodes are reached. Pure.

A launcher is a dataclass that satisfies :class:`Launcher`; its fields are what only it needs to know.
"""

from collections.abc import Mapping
from typing import Final

from tridock.launchers.local import Local
from tridock.launchers.run import Launcher
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.ssh import Ssh

LAUNCHERS: Final[Mapping[str, type[Launcher]]] = {launcher.name: launcher for launcher in (Ssh, Slurm, Local)}
"""By the name in ``supervision.json``."""
