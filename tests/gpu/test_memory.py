"""The planner's memory against what torch allocates on a GPU: within 5 %, for sizes, ZeRO stages and recomputation."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.conftest import steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", steps.MEMORY.values(), ids=steps.MEMORY)
def test_the_plan_says_what_is_allocated(step: Any, passes: Callable[[Any], None]) -> None:
    passes(step)
