"""A run on a cluster with Slurm: what is asked of the scheduler, and the script that it is given. Pure."""

from tridock.launchers.slurm.request import Request, make_request, tasks_per_node
from tridock.launchers.slurm.script import Element, Script, render

__all__ = ["Element", "Request", "Script", "make_request", "render", "tasks_per_node"]
