"""Launchers: the command line of a run's ranks, the first files of its folder, access to its nodes. Pure.

A launcher is a dataclass that satisfies :class:`Launcher`; its fields are its own parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tridock.launchers.local import Local
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.ssh import Ssh

if TYPE_CHECKING:  # the planner, which `tridock run` does not import
    from tridock.launchers.run import Launcher

LAUNCHERS: Final[Mapping[str, type[Launcher]]] = {launcher.name: launcher for launcher in (Ssh, Slurm, Local)}
"""Launchers by their name in ``supervision.json``."""
