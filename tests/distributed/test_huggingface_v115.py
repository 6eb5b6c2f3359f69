"""The weights that Megatron-LM v1.1.5 saves, in every layout, as a folder of transformers'."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Started, losses
from tests.distributed.test_megatron_v115 import LAYOUTS, PATIENCE, WARMUP, experiment
from tests.experiments import make_plan
from tests.megatron_source import patched_source
from tridock.cli import main
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.experiment import dump_experiment
from tridock.train.huggingface.export import export

pytest.importorskip("safetensors")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

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
            finished = started.wait(PATIENCE)
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
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
    assert losses(run)[LAST, "train"] == pytest.approx(loss, abs=1e-5)


def test_text_comes_from_the_run_and_its_vocabulary(
    exported: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run = exported("ddp")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.with_name("hf-ddp"))
    assert tokenizer.decode(tokenizer("def main():\n")["input_ids"]) == "def main():\n"
    assert main(["generate", str(run), "--prompt", "def ", "--temperature", "0", "--max-new-tokens", "5"]) == 0
    assert capfd.readouterr().out.startswith("def ")
