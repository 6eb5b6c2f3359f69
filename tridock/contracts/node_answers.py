"""What ``python -m tridock.node VERB`` prints for a host that asks: JSON, of one version on both sides."""

from __future__ import annotations

from typing import Final, TypedDict

PROTOCOL: Final = 2
"""The version of the verbs and their answers, in every node report. To be raised with a change that a caller notices:
an image of another version is then named as such."""
USAGE: Final = 2
"""argparse's exit code: the image does not know the verb or an option. No verb of the doctor refuses a request."""


class PortAnswer(TypedDict, total=False):
    """A port of the node for the rendezvous, or why there is none."""

    port: int
    port_problem: dict[str, str]
    """The fields of a :class:`tridock.errors.Problem`."""
