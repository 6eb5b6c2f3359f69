"""GPU tests are skipped on a machine without GPUs only: where ``nvidia-smi`` lists some, torch has to see them."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Raises the RunError of a rank, with torch's reason, if torch sees no GPU of those that are listed."""
    pytest.importorskip("torch")
    from tridock.train.rank.device import choose_device

    if choose_device(0).type == "cpu":
        pytest.skip("no GPU on this machine")
