"""The doctor: tests a cluster before a run needs it, reports problems, and applies safe fixes."""

from tridock.ops.doctor.check import Request, ask_for_quick_reports, check, check_quickly
from tridock.ops.doctor.finding import Report
from tridock.ops.doctor.output import lines, table, to_json
from tridock.ops.doctor.remedies import apply_fixes

__all__ = [
    "Report",
    "Request",
    "apply_fixes",
    "ask_for_quick_reports",
    "check",
    "check_quickly",
    "lines",
    "table",
    "to_json",
]
