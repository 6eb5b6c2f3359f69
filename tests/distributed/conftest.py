"""Where the ranks of a module's tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import make_data


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small data set."""
    folder = tmp_path_factory.mktemp("workspace")
    make_data(folder)
    return folder
