"""Every engine trains on a GPU, in both short formats: the loss falls and the run says on what it ran."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu.runs import train
from tests.megatron_source import REMEDY, patched_source
from tridock.contracts.environment import MEGATRON
from tridock.data.corpus import prepare_demo

INSTALLED = Path("/opt/megatron-v1.1.5")
"""Where the image has it."""
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    prepare_demo(folder / "data" / "demo", report=lambda _: None)
    return folder


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (INSTALLED / "pretrain_gpt2.py").is_file():
        return INSTALLED
    # Not skipped: who asks for these tests has a GPU, and would take them for passed.
    assert MEGATRON in os.environ, f"the source of Megatron-LM v1.1.5 is not at hand; {REMEDY}"
    return patched_source(tmp_path_factory.mktemp("megatron") / "source")


def check(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "split" not in line]
    assert losses[-1] < losses[0] - 0.5
    end = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert end["device"] != "cpu"
    assert end["peak_memory_bytes"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_megatron_core(workspace: Path, precision: str) -> None:
    layout = ("parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=1")
    check(train(workspace, "demo-3d.yaml", *layout, f"precision={precision}"))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("config", ["tiny-345m", "tiny-345m-distributed"])
def test_megatron_v115(workspace: Path, megatron: Path, config: str, precision: str) -> None:
    check(train(workspace, f"megatron/{config}.yaml", f"precision={precision}", TRIDOCK_MEGATRON=str(megatron)))


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_torch(workspace: Path, strategy: str, precision: str) -> None:
    check(
        train(
            workspace, "demo.yaml", f"parallel.strategy={strategy}", "parallel.zero_stage=0", f"precision={precision}"
        )
    )
