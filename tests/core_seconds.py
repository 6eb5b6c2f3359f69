"""Writes the core seconds of a pytest session beside its report log, for tools/test_verdict.py; hooks.

They are the machine's: what runs in containers, or after its parent has ended, belongs to no process of the tests.
Blocks that run at once count each other's too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BEGAN = pytest.StashKey[float]()


def _used() -> float:
    """Since the machine started: proc(5), all but idle and iowait; guests are part of user."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_BEGAN] = _used()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Once all workers have ended."""
    path = session.config.getoption("report_log", None)
    if path and not hasattr(session.config, "workerinput"):
        Path(path).with_suffix(".cores").write_text(f"{_used() - session.stash[_BEGAN]:.0f}\n")
