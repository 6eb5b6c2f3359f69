"""The weights that Megatron-LM v1.1.5 saves, in every layout, as a folder of transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.distributed.ranks import Started, events, losses
from tests.distributed.test_megatron_v115 import LAYOUTS, WARMUP, experiment
from tests.exact_logits import exact_logits
from tests.experiments import make_plan
from tests.megatron_source import patched_source
from tridock.cli import main
from tridock.contracts.run_folder import DEEPSPEED_CONFIG
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.engines.deepspeed import deepspeed_config
from tridock.experiment import dump_experiment
from tridock.train.huggingface.export import export
from tridock.train.models.gpt import GPT, Shape
from tridock.train.pretrained import pretrained_weights

pytest.importorskip("safetensors")

pytestmark = pytest.mark.distributed

LAST = 3
FIELDS: dict[str, Any] = {
    "train.train_iters": LAST, "train.save": True, "train.save_interval": LAST - 1, "train.eval_interval": 0,
    WARMUP: 1, "optimizer.lr": 0.05, "model.make_vocab_size_divisible_by": 125,
}  # fmt: skip
"""Weights that move much, and a vocabulary without padding, which would have its share of the loss."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By layout, the run; ``hf-<layout>`` beside it has the weights from before the last iteration."""
    workspace = tmp_path_factory.mktemp("workspace")
    source = patched_source(workspace / "source")
    prepare_demo(workspace / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=300_000)

    @cache
    def run(name: str) -> Path:
        world_size, fields = LAYOUTS[name]
        given = experiment(**{**FIELDS, **fields})
        folder = workspace / "runs" / name
        folder.mkdir(parents=True)
        plan = make_plan(given, {"localhost": range(world_size)}, name)
        resolved = given.resolved(plan.data_parallel_size)
        program = rank_program(resolved, plan, name, str(folder))
        (folder / "experiment.yaml").write_text(dump_experiment(resolved))
        for file, content in program.files.items():
            (folder / file).write_bytes(content)
        module = "tests.distributed.recorded_batches_v115" if name == "ddp" else program.module
        env = {**program.env, "TRIDOCK_MEGATRON": str(source)}
        with Started(["-m", module, *program.arguments], folder, world_size, env) as started:
            finished = started.wait()
        assert finished.codes == [0] * world_size, "\n".join(finished.err)
        export(folder, workspace / "runs" / f"hf-{name}", LAST - 1)
        return folder

    return run


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "tp2", "tp2-pp2"])
def test_the_loss_is_that_of_transformers(exported: Callable[[str], Path], layout: str) -> None:
    transformers = pytest.importorskip("transformers")
    run, folder = exported(layout), exported(layout).with_name(f"hf-{layout}")
    # Every layout trains on the same samples.
    tokens = torch.cat([torch.load(file) for file in sorted(exported("ddp").glob("batch-*.pt"))])
    assert tokens.shape == (8, 65)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = exact_logits(model, tokens[:, :-1]).flatten(0, 1)
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
    assert losses(run)[LAST, "train"] == pytest.approx(loss, abs=1e-5)


ELSEWHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel.strategy": "fsdp"}),
    "zero1": (2, {"engine": "megatron-core", "parallel.pipeline_model_parallel_size": 2}),
    "zero3": (2, {"parallel.strategy": "zero", "parallel.zero_stage": 2}),
    "tp2": (2, {"engine": "megatron-core", "parallel.tensor_model_parallel_size": 2}),
    "tp2-pp2": (2, {"parallel.tensor_model_parallel_size": 2}),
}
"""By layout of v1.1.5, ranks and layout of another engine that starts from its weights."""
STILL = {
    "train.train_iters": 1, "train.save": False, "train.save_interval": 0, "optimizer.lr": 1e-30, WARMUP: 0,
    "optimizer.min_lr": 0.0, "model.activation_func": "gelu", "megatron_args": [], "engine": "torch",
    "parallel.strategy": "ddp", "data.vocab_file": None, "data.merge_file": None,
}  # fmt: skip


@pytest.mark.parametrize("layout", thinned(ELSEWHERE, ("zero1", "tp2-pp2")))
def test_other_engines_start_from_its_checkpoint(exported: Callable[[str], Path], layout: str) -> None:
    run = exported(layout)
    workspace = run.parents[1]
    (saved,) = (run / "checkpoints").glob(f"*[p_]*{LAST - 1}")
    world_size, fields = ELSEWHERE[layout]
    load = {"train.load": f"megatron:{saved.relative_to(workspace)}"}
    given = experiment(**{**FIELDS, **STILL, **fields, **load})
    folder = workspace / "runs" / f"from-{layout}"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(dump_experiment(given))
    if given.parallel.strategy == "zero":
        (folder / DEEPSPEED_CONFIG).write_text(json.dumps(deepspeed_config(given, world_size)))
    imports = "megatron-core" if given.engine == "megatron-core" else "deepspeed"
    with Started(["-m", "tests.distributed.recorded_batches", str(folder)], folder, world_size, {}, imports) as started:
        finished = started.wait()
    assert finished.codes == [0] * world_size, "\n".join(finished.err)
    assert events(folder)[0] == "checkpoint_loaded"

    model = GPT(Shape.of(given.model, 500))
    weights = pretrained_weights(given, workspace, 500)
    assert weights is not None
    model.load_state_dict(dict(weights.items()))

    def loss(files: Iterable[Path]) -> float:
        tokens = torch.cat([torch.load(file) for file in sorted(files)])
        with torch.no_grad():
            return float(model(tokens[:, :-1], tokens[:, 1:]))

    # v1.1.5's next iteration had these weights; every layout of it trains on the same samples.
    assert losses(run)[LAST, "train"] == pytest.approx(loss(exported("ddp").glob("batch-*.pt")), abs=1e-5)
    assert losses(folder)[1, "train"] == pytest.approx(loss(folder.glob("batch-*.pt")), abs=1e-5)


def test_text_comes_from_the_run_and_its_vocabulary(
    exported: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run = exported("ddp")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf-ddp"))
    assert tokenizer.decode(tokenizer("def main():\n")["input_ids"]) == "def main():\n"
    assert main(["generate", str(run), "--prompt", "def ", "--temperature", "0", "--max-new-tokens", "5"]) == 0
    assert capfd.readouterr().out.startswith("def ")
