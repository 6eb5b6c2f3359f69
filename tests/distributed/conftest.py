"""Where the ranks of a module's tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import make_data
from tests.distributed.supervised import make as make  # a fixture of every module
from tests.megatron_source import patched_source

# The longest begin first, so that no worker is left with one at the end.
FIRST = (
    *("test_run_supervisor", "test_rehearse", "test_megatron_core", "test_local_disks", "test_resume", "test_restart"),
    *("test_shared_models", "test_reproduce", "test_bench", "test_supervised_restarts", "test_triage"),
    "test_several_nodes",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small data set."""
    folder = tmp_path_factory.mktemp("workspace")
    make_data(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron-LM v1.1.5's source with the patches."""
    return patched_source(tmp_path_factory.mktemp("megatron") / "source")
