"""The doctor: proves a cluster before a run needs it, names what is wrong, and mends what is safe to mend."""

from tridock.ops.doctor.check import Request, check, check_quickly
from tridock.ops.doctor.finding import Report
from tridock.ops.doctor.output import lines, table, to_json
from tridock.ops.doctor.remedies import mend

__all__ = ["Report", "Request", "check", "check_quickly", "lines", "mend", "table", "to_json"]
