"""Launchers: the command line of a run's ranks, the first files of its folder, access to its nodes. Pure.

A launcher is a dataclass, whose fields are its own parameters.
"""

from collections.abc import Mapping
from typing import Final

from tridock.launchers.local import Local
from tridock.launchers.run import Launcher
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.ssh import Ssh

LAUNCHERS: Final[Mapping[str, type[Launcher]]] = {launcher.name: launcher for launcher in (Ssh, Slurm, Local)}
"""Launchers by their name in ``supervision.json``."""
