"""Records how a pytest session ended beside its JUnit file, for tools/test_verdict.py; hooks that conftest.py imports.

The record's failed tests can be run again by their ids, which a JUnit file has not.
"""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

_LINES = 6
_failed: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Where workers run the tests, SIGTERM ends them as Ctrl-C does: what they have seen so far is recorded."""
    if config.getoption("numprocesses", None):
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _said(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The end of a failure: pytest marks the error's own lines with E."""
    lines = [line.rstrip() for line in report.longreprtext.splitlines() if line.strip()]
    return "\n".join([line for line in lines if line.startswith("E ")][-_LINES:] + lines[-1:])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _failed.setdefault(report.nodeid, _said(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.setdefault(report.nodeid, _said(report))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Once all workers have ended."""
    path = session.config.getoption("xmlpath", None)
    if path and not hasattr(session.config, "workerinput"):
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cores = sum(it.ru_utime + it.ru_stime for it in used)
        record = {"exit_code": int(exitstatus), "failed": _failed, "core_seconds": round(cores, 1)}
        Path(path).with_suffix(".json").write_text(json.dumps(record, indent=1))
