"""GPU tests are skipped on a machine without GPUs only: where ``nvidia-smi`` lists some, torch has to see them.

They are steps of `tools/gpu_trial.py`, which the trial runs one after another without pytest.
"""

import importlib.util
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_source import patched_source
from tests.tools import tool
from tridock.contracts.devices import listed_devices
from tridock.contracts.environment import MEGATRON
from tridock.data.corpus import prepare_demo

steps, _, trial = tool("trial_steps"), tool("trial_results"), tool("gpu_trial")


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


@pytest.fixture(scope="session")
def workspace(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of the runs, with the demo's data; and the patched source of a repository of Megatron-LM."""
    folder, given = tmp_path_factory.mktemp("workspace"), os.environ.get(MEGATRON)
    prepare_demo(folder / "data" / "demo", report=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if given and not (Path(given) / "pretrain_gpt2.py").is_file():
            patch.setenv(MEGATRON, str(patched_source(folder / "megatron")))
        yield folder


@pytest.fixture
def passes(workspace: Path, tmp_path: Path) -> Callable[[Any], None]:
    """Runs a step, and fails with its reason."""

    def run(step: Any) -> None:
        found = trial.Trial(math.inf, False, tmp_path).measure(step)
        assert found.outcome == "passed", found

    return run
