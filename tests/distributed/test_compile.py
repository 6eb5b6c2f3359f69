"""``train.compile`` on CPU ranks: every layout has the losses of the layers as they are written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.ranks import Started, asked_for, events, losses, make_run, metrics, run

pytestmark = pytest.mark.distributed
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

TOLERANCE = 1e-5
"""Absolute, over 6 steps in fp32: fused sums come in another order (seen: 5e-7)."""
BASE = {"train.train_iters": 6, "model.num_layers": 4, "batch.micro_batch_size": 1, "train.eval_interval": 3}
TP, PP = (f"parallel.{name}_model_parallel_size" for name in ("tensor", "pipeline"))
RECOMPUTED = {"model.checkpoint_activations": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp-recomputed": {"parallel.strategy": "fsdp", **RECOMPUTED},
    "tp2": {TP: 2},
    "pp2-recomputed": {PP: 2, **RECOMPUTED},
}


SOME = ("fsdp-recomputed",)
CASES = thinned(LAYOUTS, SOME)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, workspace: Path) -> dict[str, Path]:
    layouts = asked_for(request, LAYOUTS, SOME)
    compiled = {"train.compile": True}
    folders = {name: make_run(workspace, name, 2, **BASE, **compiled, **fields) for name, fields in layouts.items()}
    folders["as-written"] = make_run(workspace, "as-written", 2, **BASE)
    argv = ["-m", "tests.distributed.compiled", *map(str, folders.values())]
    with Started(argv, workspace, 2, {}, "torch") as started:
        finished = started.wait()
    assert finished.codes == [0, 0], "\n".join(finished.err)
    return folders


@compiles
@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_the_layers_as_written(runs: dict[str, Path], name: str) -> None:
    assert losses(runs[name]) == pytest.approx(losses(runs["as-written"]), abs=TOLERANCE, rel=0)
    norms, theirs = (
        [entry["grad_norm"] for (_, split), entry in metrics(folder).items() if split == "train"]
        for folder in (runs[name], runs["as-written"])
    )
    assert norms == pytest.approx(theirs, rel=1e-4)


@compiles
@pytest.mark.parametrize("name", CASES)
def test_each_layer_is_one_graph_for_all(runs: dict[str, Path], name: str) -> None:
    """One that trains and one that evaluates, however many layers there are, whole; and one each way of the loss."""
    for rank in range(2):
        has_loss = not name.startswith("pp2") or rank == 1
        found = json.loads((runs[name] / f"graphs-{rank}.json").read_text())
        assert found == {"graphs": 4 if has_loss else 2, "breaks": 0}
    assert json.loads((runs["as-written"] / "graphs-0.json").read_text())["graphs"] == 0


def test_without_a_compiler_the_run_does_not_begin(workspace: Path) -> None:
    folder = make_run(workspace, "no-compiler", 1, **{"train.compile": True})
    finished = run(folder, 1, CXX="clang++-0")
    assert finished.codes == [2]
    assert finished.out[0].splitlines()[-1] == (
        "train.compile: needs a C++ compiler where the ranks are on the CPU; got no clang++-0 on the PATH; "
        "install g++, name another in CXX, or set it to false"
    )
    assert "model_built" not in events(folder)
