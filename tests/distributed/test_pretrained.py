"""Runs begin with a checkpoint that somebody else's program wrote with DeepSpeed, and have the loss of its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.distributed.ranks import VOCABULARY, Started, asked_for, losses, make_run
from tests.distributed.test_huggingface import CORE, STILL, exported, weights
from tests.distributed.test_shared_models import LLAMA, PP, STRATEGY, TP
from tests.exact_logits import exact_logits
from tridock.experiment import load_experiment
from tridock.experiment.transformers_config import config_of

pytest.importorskip("safetensors")
pytest.importorskip("megatron.core", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.distributed

KINDS: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": LLAMA}
SOURCES = {"zero1": ("llama", 1), "zero2": ("gpt2", 2), "zero3": ("llama", 3)}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "fsdp": (2, {STRATEGY: "fsdp"}),
    "zero3": (2, {STRATEGY: "zero", "parallel.zero_stage": 3}),
    "tp2": (2, {TP: 2}),
    "core-tp2": (2, {**CORE, TP: 2}),
    "core-pp2": (2, {**CORE, PP: 2}),
}
CASES = {f"{source}-{layout}": (source, layout) for source in SOURCES for layout in LAYOUTS}
SOME = ("zero2-tp2", "zero3-core-pp2")


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest, workspace: Path) -> dict[str, Path]:
    """By name, the folder of ``save_checkpoint`` in ``data/``, with the same model in ``model`` there."""
    found = {}
    for name in dict.fromkeys(source for source, _ in asked_for(request, CASES, SOME).values()):
        kind, stage = SOURCES[name]
        experiment = load_experiment(make_run(workspace, f"like-{name}", 1, **STILL, **KINDS[kind]) / "experiment.yaml")
        folder = workspace / "data" / name
        folder.mkdir()
        (folder / "given.json").write_text(json.dumps(config_of(experiment.model, VOCABULARY, "float32", None)))
        argv = ["-m", "tests.distributed.foreign_deepspeed", str(stage), str(folder / "given.json"), str(folder)]
        with Started(argv, folder, 2, {}) as started:
            finished = started.wait()
        assert finished.codes == [0, 0], "\n".join(finished.err)
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, workspace: Path, sources: dict[str, Path]) -> dict[str, Path]:
    found = {}
    for name, (source, layout) in asked_for(request, CASES, SOME).items():
        ranks, fields = LAYOUTS[layout]
        load = {"train.load": f"deepspeed:data/{source}"}
        own = {**STILL, **KINDS[SOURCES[source][0]], **fields, **load}
        run = found[name] = make_run(workspace, name, ranks, **own)
        argv = ["-m", "tests.distributed.recorded_batches", str(run)]
        with Started(argv, run, ranks, {}, "megatron-core" if layout.startswith("core") else "deepspeed") as started:
            finished = started.wait()
        assert finished.codes == [0] * ranks, "\n".join(finished.err)
    return found


@pytest.mark.parametrize("name", thinned(CASES, SOME))
def test_the_loss_is_that_of_the_model_which_deepspeed_trained(
    runs: dict[str, Path], sources: dict[str, Path], name: str
) -> None:
    source, _ = CASES[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(sources[source] / "model", dtype=torch.float32)
    tokens = torch.cat([torch.load(file) for file in sorted(runs[name].glob("batch-*.pt"))])
    wanted = exact_logits(model, tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(wanted, tokens[:, 1:].flatten())
    assert losses(runs[name])[1, "train"] == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("name", thinned(CASES, SOME))
def test_the_weights_are_those_that_deepspeed_trained(
    runs: dict[str, Path], sources: dict[str, Path], name: str
) -> None:
    found, wanted = weights(exported(runs[name])), weights(sources[CASES[name][0]] / "model")
    assert found.keys() == wanted.keys()
    assert max(float((found[key] - wanted[key]).abs().max()) for key in found) == 0.0
