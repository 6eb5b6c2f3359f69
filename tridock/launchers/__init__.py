"""Ranks to what the head executes: the launcher's command line and the run's files. Pure."""

from tridock.launchers.bundle import RunBundle, make_bundle

__all__ = ["RunBundle", "make_bundle"]
