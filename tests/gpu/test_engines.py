"""Every engine trains on a GPU, in each format that it has: the loss falls and the run says on what it ran."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.conftest import steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", steps.ENGINES, ids=lambda step: step.name)
def test_the_engine_trains(step: Any, passes: Callable[[Any], None]) -> None:
    passes(step)
