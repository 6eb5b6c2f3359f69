"""Weights come and go one by one: no rank and no export holds the whole model, whatever engine and layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.distributed.ranks import VOCABULARY, Started, asked_for, make_run, run_several
from tests.distributed.test_huggingface import CORE, PP, SP, STILL, STRATEGY, TP, VPP
from tridock.experiment import load_experiment
from tridock.experiment.transformers_config import config_of
from tridock.experiment.transformers_weights import transformers_shapes

pytest.importorskip("safetensors")
pytest.importorskip("megatron.core", exc_type=ImportError)

pytestmark = pytest.mark.distributed

DEEP = {"model.num_layers": 12}
LARGE = {**DEEP, "model.hidden_size": 384, "model.num_attention_heads": 8}
"""21 million parameters: 85 MB in fp32. The largest weight has a 36th of it."""
BYTES = 4 * 21_300_000
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (4, {STRATEGY: "fsdp"}),
    "zero3": (4, {STRATEGY: "zero", "parallel.zero_stage": 3}),
    "tp2-pp2": (4, {TP: 2, PP: 2}),
    "pp4": (4, {PP: 4}),
    "core-tp2-pp2": (4, {**CORE, TP: 2, SP: True, PP: 2}),
    "core-pp4-vpp3": (4, {**CORE, PP: 4, VPP: 3}),
}
SOME = ("core-tp2-pp2",)
EXPORTED: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "fsdp": (2, {STRATEGY: "fsdp"}),
    "zero3": (2, {STRATEGY: "zero", "parallel.zero_stage": 3}),
    "core-tp2": (2, {**CORE, TP: 2}),
}
SOME_EXPORTED = ("fsdp",)


def folder_of(workspace: Path, name: str, **fields: Any) -> str:
    """A transformers folder with a model of these fields."""
    from safetensors.torch import save_file

    experiment = load_experiment(make_run(workspace, f"like-{name}", 1, **STILL | fields) / "experiment.yaml")
    folder = workspace / "data" / name
    folder.mkdir()
    shapes = transformers_shapes(experiment.model, VOCABULARY)
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(experiment.model, VOCABULARY, "float32", None)))
    return f"hf:data/{name}"


@pytest.fixture(scope="module")
def loads(workspace: Path) -> dict[str, str]:
    return {
        "small": folder_of(workspace, "small-model", **DEEP),
        "large": folder_of(workspace, "large-model", **LARGE),
    }


def most(workspace: Path, loads: dict[str, str], layout: str, *, from_weights: bool) -> list[int]:
    """How much memory each rank has at most while it builds the large model, from weights or from random ones.

    In processes of their own: what one gave back it would still have. The small model is there for the imports.
    """
    ranks, fields = LAYOUTS[layout]
    own = {**STILL, **fields, **DEEP}
    name = f"{layout}-{'weights' if from_weights else 'random'}"
    folders = [
        make_run(workspace, f"{name}-small", ranks, **{**own, "train.load": loads["small"]}),
        make_run(workspace, name, ranks, **{**own, **LARGE, "train.load": loads["large"] if from_weights else None}),
    ]
    argv = ["-m", "tests.distributed.anonymous_memory", "build", *map(str, folders)]
    with Started(argv, folders[1], ranks, {}, "megatron-core" if "core" in layout else "deepspeed") as started:
        finished = started.wait()
    assert finished.codes == [0] * ranks, "\n".join(finished.err)
    return [json.loads(out.splitlines()[-1])[name] for out in finished.out]


@pytest.mark.parametrize("layout", thinned(LAYOUTS, SOME))
def test_no_rank_holds_the_weights_that_it_starts_from(workspace: Path, loads: dict[str, str], layout: str) -> None:
    """Beyond its own part, and beyond what the engine makes in any case, a rank holds a few weights at a time."""
    found = [most(workspace, loads, layout, from_weights=it) for it in (True, False)]
    assert max(found[0]) - max(found[1]) < 0.1 * BYTES, found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, workspace: Path) -> dict[str, list[Path]]:
    """Of each layout two runs that have saved, a small one and a large one."""
    found = {}
    for name, (ranks, fields) in asked_for(request, EXPORTED, SOME_EXPORTED).items():
        own = {**STILL, **fields, "batch.global_batch_size": 4}
        found[name] = [
            make_run(workspace, f"saved-{name}-{size}", ranks, **{**own, **it})
            for size, it in (("small", {}), ("large", LARGE))
        ]
        run_several(found[name], ranks)
    return found


@pytest.mark.parametrize("layout", thinned(EXPORTED, SOME_EXPORTED))
def test_no_export_holds_the_whole_model(runs: dict[str, list[Path]], layout: str) -> None:
    argv = ["-m", "tests.distributed.anonymous_memory", "export", *map(str, runs[layout])]
    with Started(argv, runs[layout][0], 1, {}, "megatron-core") as started:
        finished = started.wait()
    assert finished.codes == [0], finished.err
    grown = json.loads(finished.out[0].splitlines()[-1])[runs[layout][1].name]
    written = sum(file.stat().st_size for file in Path(f"{runs[layout][1]}-hf").glob("*.safetensors"))
    assert written > 0.99 * BYTES
    assert grown < 0.5 * BYTES, grown
