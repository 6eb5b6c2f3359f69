"""Why a run failed: the first failure, the rule that knows it, what to do. Pure: facts in, words out."""

from tridock.triage.diagnosis import Diagnosis, diagnose
from tridock.triage.facts import Facts, facts_of
from tridock.triage.report import report
from tridock.triage.rules import RULES, Rule

__all__ = ["RULES", "Diagnosis", "Facts", "Rule", "diagnose", "facts_of", "report"]
