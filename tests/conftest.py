"""What holds for every test."""

import gc
import os
import signal

import pytest
from hypothesis import settings

# A shell that starts the tests in its background lets them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What is started here writes as it does for users, who seldom have this set.
os.environ.pop("PYTHONUNBUFFERED", None)

# How long an example takes depends on what else the machine does: a deadline would fail good code.
settings.register_profile("tridock", deadline=None, max_examples=50)
settings.register_profile("tridock-full", deadline=None, max_examples=200)


def pytest_configure(config: pytest.Config) -> None:
    """The full matrices try more examples too."""
    settings.load_profile("tridock" if "not full" in config.getoption("markexpr") else "tridock-full")


def pytest_collection_finish() -> None:
    """Modules stay to the end: no garbage collection has to walk through those of torch again."""
    gc.collect()
    gc.freeze()
