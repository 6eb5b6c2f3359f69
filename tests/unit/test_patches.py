"""The series of patches/megatron-v1.1.5: each says why, is small, and applies to upstream's source."""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.megatron_source import PATCHES, apply_patch, patched_source, pristine_source

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


def loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's module of data sets as a rank that makes no index maps, without torch and the rest of Megatron."""
    torch, megatron = MagicMock(), MagicMock()
    torch.cuda.LongTensor()[0].item.return_value = torch.distributed.get_world_size.return_value
    for name in ("megatron", "megatron.data", "megatron.data.dataset_utils", "megatron.data.indexed_dataset"):
        monkeypatch.setitem(sys.modules, name, megatron)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    spec = importlib.util.spec_from_file_location("gpt2_dataset", source / "megatron/data/gpt2_dataset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_index_map_that_is_a_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "done"),)

    dataset = loaded(patched_source(tmp_path / "source"), monkeypatch)
    maps = [tmp_path / f"d_train_indexmap_3ns_4sl_1s_{part}_idx.npy" for part in ("doc", "sample", "shuffle")]
    arguments = ("train", str(tmp_path / "d"), np.arange(2), np.array([9, 9]), 3, 4, 1)
    for path in maps:
        np.save(path, np.arange(3))
    assert [found.tolist() for found in dataset._build_index_mappings(*arguments)] == [[0, 1, 2]] * 3
    for path in maps:
        path.write_bytes(pickle.dumps(Evil()))
        with pytest.raises(ValueError, match="pickled"):
            dataset._build_index_mappings(*arguments)
        np.save(path, np.arange(3))
    assert not (tmp_path / "done").exists()


def test_nothing_that_lies_beside_data_is_read_as_a_pickle(tmp_path: Path) -> None:
    source = patched_source(tmp_path / "source")
    loads = [
        line for path in source.glob("megatron/data/*.py") for line in re.findall(r"np\.load\(.*", path.read_text())
    ]
    assert len(loads) == 5
    assert all("allow_pickle=False" in line for line in loads)
