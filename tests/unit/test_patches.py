"""The series of patches/megatron-v1.1.5: each says why, is small, and applies to upstream's source."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.megatron_source import PATCHES, apply_patch, pristine_source

LARGEST = 12
NUMBERS = [f"{number:04d}" for number in range(1, len(PATCHES) + 1)]


def test_numbered_without_a_gap() -> None:
    assert PATCHES
    assert [path.name[:4] for path in PATCHES] == NUMBERS


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.name)
def test_says_why_and_stays_small(patch: Path) -> None:
    header, _, body = patch.read_text().partition("diff --git ")
    assert re.search(r"^Upstream: deepspeedai/DeepSpeedExamples [0-9a-f]{12}, ", header, re.MULTILINE)
    assert len(header.split("\n\n")) > 2, "a title, a reason, an upstream reference"
    changed = [line for line in body.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert 0 < len(changed) <= LARGEST
    assert all(
        int(count) <= LARGEST for hunk in re.findall(r"^@@ -\d+,(\d+) \+\d+,(\d+) @@", body, re.M) for count in hunk
    )


def test_the_series_applies(tmp_path: Path) -> None:
    source = pristine_source(tmp_path / "source")
    before = (source / "megatron/learning_rates.py").read_text()
    for patch in PATCHES:
        apply_patch(patch, source)
    after = (source / "megatron/learning_rates.py").read_text()
    if before != after:
        assert "class AnnealingLR(object)" in before
    assert "class AnnealingLR(_LRScheduler)" in after
    assert "def __call__" not in after
    python = subprocess.run(["python3", "-m", "compileall", "-q", str(source / "megatron")], check=False)
    assert python.returncode == 0
