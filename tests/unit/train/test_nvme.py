"""The folder in which a rank keeps states on NVMe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tridock.errors import RequestError
from tridock.train.parallel import nvme
from tridock.train.rank.process_group import Ranks

pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[3]
RANKS = Ranks(1, 1, 2, torch.device("cpu"))
MODEL = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 2))
PROGRAM = """
import sys
from pathlib import Path
from tests.unit.train.test_nvme import config
folder = Path(config(sys.argv[1])["zero_optimization"]["offload_param"]["nvme_path"])
(folder / "zero_stage_3").mkdir(parents=True)
(folder / "zero_stage_3/a.tensor.swp").touch()
"""


def config(folder: str) -> dict[str, object]:
    options = {"device": "nvme", "nvme_path": folder}
    given = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": options}}
    return nvme.config_of_rank(given, MODEL, "a-run", RANKS)


def test_a_rank_has_its_own_folder_and_room_for_its_part_of_any_weight(tmp_path: Path) -> None:
    left = tmp_path / "a-run/rank-1/zero_stage_3"
    left.mkdir(parents=True)
    assert config(str(tmp_path)) == {
        "zero_optimization": {
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"buffer_size": 20, "device": "nvme", "nvme_path": f"{tmp_path}/a-run/rank-1"},
        }
    }
    assert not left.exists()


def test_a_rank_that_starts_leaves_the_runs_folder_to_the_others(tmp_path: Path) -> None:
    """Another one may be making its own in it at this moment."""
    runs = tmp_path / "a-run"
    runs.mkdir()
    before = runs.stat().st_ino
    config(str(tmp_path))
    assert runs.stat().st_ino == before


def test_a_rank_that_ends_removes_its_files_only(tmp_path: Path) -> None:
    other = tmp_path / "a-run/rank-0"
    other.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, check=True)
    assert [*tmp_path.rglob("*")] == [tmp_path / "a-run", other]


def test_another_deepspeed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locked one is the one that its states on NVMe were saved and loaded with."""
    assert re.search(r"^deepspeed==(\S+)", (ROOT / "locks/deepspeed.txt").read_text(), re.M)[1] == nvme.DEEPSPEED  # type: ignore[index]
    monkeypatch.setattr("deepspeed.__version__", "0.20.0")
    with pytest.raises(RequestError, match=r"device nvme works with DeepSpeed 0\.19\.8; got 0\.20\.0; use an image"):
        config(str(tmp_path))
