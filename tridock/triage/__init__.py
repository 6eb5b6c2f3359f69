"""Why a run failed: the first failure, the rule that matches it, and the remedy. Pure."""

from tridock.triage.diagnosis import RULES, Diagnosis, diagnose, report
from tridock.triage.facts import Facts, facts_of

__all__ = ["RULES", "Diagnosis", "Facts", "diagnose", "facts_of", "report"]
