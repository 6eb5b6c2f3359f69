"""Why a run failed: the first failure, the rule that matches it, and the remedy. Pure."""

from tridock.triage.diagnosis import Diagnosis, diagnose, report
from tridock.triage.facts import Facts, facts_of
from tridock.triage.rules import RULES

__all__ = ["RULES", "Diagnosis", "Facts", "diagnose", "facts_of", "report"]
