"""GPU tests are skipped on a machine without GPUs only: where ``nvidia-smi`` lists some, torch has to see them."""

import importlib.util
import subprocess
from contextlib import suppress

import pytest

from tridock.contracts.devices import listed_devices


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Raises the RunError of a rank, with torch's reason, if torch sees no GPU of those that are listed."""
    if importlib.util.find_spec("torch") is None:
        assert not _listed(), "nvidia-smi lists GPUs, and torch is not installed"
        pytest.skip("no torch, and no GPU on this machine")
    from tridock.train.rank.device import choose_device

    if choose_device(0).type == "cpu":
        pytest.skip("no GPU on this machine")


def _listed() -> tuple[str, ...]:
    with suppress(OSError):
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
        return listed_devices(done.stdout)
    return ()
