"""All rules, in the order in which they are asked; the last one asks for nothing."""

from __future__ import annotations

from typing import Final

from tridock.triage.rule import Rule
from tridock.triage.rules_of_data import DATA
from tridock.triage.rules_of_memory import MEMORY
from tridock.triage.rules_of_network import NETWORK
from tridock.triage.rules_of_software import SOFTWARE
from tridock.triage.rules_of_supervision import LEFT, SUPERVISION

RULES: Final[tuple[Rule, ...]] = (*SUPERVISION, *MEMORY, *NETWORK, *DATA, *SOFTWARE, *LEFT)

__all__ = ["RULES", "Rule"]
