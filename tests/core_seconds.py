"""Writes the core seconds of a pytest session beside its report log, for tools/test_verdict.py; a hook."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Once all workers have ended: of the tests, and of the processes that they waited for."""
    path = session.config.getoption("report_log", None)
    if path and not hasattr(session.config, "workerinput"):
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        Path(path).with_suffix(".cores").write_text(f"{sum(it.ru_utime + it.ru_stime for it in used):.0f}\n")
