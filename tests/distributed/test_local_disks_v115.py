"""As test_local_disks.py, with Megatron-LM v1.1.5."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.disks import run_on
from tests.distributed.ranks import losses
from tests.distributed.test_megatron_v115 import LAYOUTS, PP, TP, ZERO, experiment
from tests.experiments import make_plan
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.experiment import dump_experiment

pytestmark = pytest.mark.distributed

LAYOUTS_ON_NODES: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name][1] for name in ("ddp", "zero1", "zero3")},
    "tp2-zero1": {TP: 2, ZERO: 1},
    "pp2-zero1": {PP: 2, ZERO: 1},
    "tp2-pp2": LAYOUTS["tp2-pp2"][1],
}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SAVES = {"train.save": True, "train.save_interval": 4, "train.train_iters": 8, "train.checkpoint_copies": 2}


@pytest.fixture(scope="module")
def data(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_demo(folder / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=300_000)
    return folder


def train(base: Path, source: Path, name: str, nodes: Sequence[str], fields: Mapping[str, Any]) -> str:
    folders, argvs, env = {}, {}, {"TRIDOCK_MEGATRON": str(source)}
    for node in dict.fromkeys(nodes):
        folder = folders[node] = base / node / "runs" / name
        folder.mkdir(parents=True)
        plan = make_plan(experiment(**fields), {"localhost": range(len(nodes))}, name)
        resolved = experiment(**fields).resolved(plan.data_parallel_size)
        program = rank_program(resolved, plan, name, str(folder))
        (folder / "experiment.yaml").write_text(dump_experiment(resolved))
        for file, content in program.files.items():
            (folder / file).write_bytes(content)
        argvs[node] = ["-m", program.module, *program.arguments]
        env |= program.env
    return run_on(nodes, folders, argvs, env, None)


@pytest.mark.parametrize(
    "layout", [pytest.param(it, marks=[] if it == "tp2-zero1" else pytest.mark.full) for it in LAYOUTS_ON_NODES]
)
def test_it_resumes_there_and_elsewhere(tmp_path: Path, source: Path, data: Path, layout: str) -> None:
    for node in ("a", "b", "c"):
        shutil.copytree(data, tmp_path / node / "data")
    fields = LAYOUTS_ON_NODES[layout] | DROPOUT | {"train.train_iters": 8, "batch.micro_batch_size": 2}
    train(tmp_path, source, "first", ["a", "a", "b", "b"], fields | SAVES)
    expected = {place: loss for place, loss in losses(tmp_path / "a/runs/first").items() if place[0] > 4}
    cases = {"same": ["a", "a", "b", "b"], "swapped": ["b", "b", "a", "a"], "without a": ["b", "b", "c", "c"]}
    for name, nodes in cases.items():
        for node in {"a", "b"} & set(nodes):  # each begins with what the first run has left
            copy = tmp_path / node / "runs" / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(tmp_path / node / "runs" / "first", copy)
        folder = next((tmp_path / "b/runs/copy/checkpoints").glob("*4"))
        output = train(tmp_path, source, name, nodes, fields | {"train.load": f"runs/copy/checkpoints/{folder.name}"})
        assert losses(tmp_path / nodes[0] / "runs" / name) == expected, name
        assert ("of other nodes are needed" in output) == (name == "without a")
