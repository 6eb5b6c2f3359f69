"""`tridock plan` where the run's data or weights are on this machine too: what they rule out is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tests.plan_command import document, refused
from tridock.cli import main
from tridock.experiment.model import Model
from tridock.experiment.transformers_config import config_of

EXPERIMENT = """\
name: t
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16, vocab_size: 50}
batch: {micro_batch_size: 1}
data: {data_path: data/x}
train: {train_iters: 3}
"""
ONE = ("t.yaml", "--nodes", "1", "--gpus-per-node", "2")
LESS = "give it a larger share, use more text, or shorten model.seq_length"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.yaml").write_text(EXPERIMENT)


def write_data(documents: int = 2, length: int = 10) -> None:
    with IndexedDatasetWriter(Path("data/x"), 50) as writer:
        for _ in range(documents):
            writer.add_document(range(length))


def test_a_plan_needs_no_file() -> None:
    assert main(["plan", *ONE, "--set", "train.load=hf:models/none"]) == 0


def test_data_without_one_sample(capsys: pytest.CaptureFixture[str]) -> None:
    write_data()
    problem = (
        "data.split: leaves the train split less than one sample of 17 tokens; "
        f"got 10 tokens in 1 of 2 documents of data/x; {LESS}"
    )
    split = ("--set", "data.split='1,1,0'")
    for options in ((), ("--search",), ("--why",)):
        assert refused(capsys, *ONE, *split, *options) == f"t.yaml: {problem}\n"
    found = document(capsys, *ONE, *split, code=2)
    assert (found["verdict"], [it["message"] for it in found["problems"]]) == ("illegal", [problem])
    assert main(["plan", *ONE]) == 0


def test_everything_that_is_wrong_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    write_data(documents=1)
    assert refused(capsys, *ONE, "--set", "model.vocab_size=null", "--set", "optimizer.min_lr=1") == (
        "t.yaml: optimizer.min_lr: must not exceed lr 0.00015; got 1; lower it\n"
        "t.yaml: model.vocab_size: is left out, and data/x.json beside the data does not say it; "
        "add it, or make the data with `tridock data preprocess`, which writes it down\n"
        "t.yaml: data.split: leaves the train split less than one sample of 17 tokens; "
        f"got 10 tokens in 1 of 1 documents of data/x; {LESS}\n"
    )


def test_a_schedule_that_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--set", "optimizer.min_lr=0", "--set", "train.train_iters=7", "--set", "optimizer.lr_decay_iters=1")
    assert refused(capsys, *ONE, *given) == (
        "t.yaml: optimizer.min_lr: makes the learning rate of all 7 steps 0; got 0; raise it, or lr_decay_iters\n"
    )
    assert main(["plan", *ONE, *given[:-1], "optimizer.lr_decay_iters=2"]) == 0


def test_weights_of_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"preset": "qwen3-0.6b", "num_layers": 1, "seq_length": 16}
    folder = Path("models/qwen")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(Model.model_validate(fields), 151936, "bfloat16", None)))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    said = refused(capsys, *ONE, "--set", "train.load=hf:models/qwen").splitlines()
    named = {line.removeprefix("t.yaml: model.").partition(":")[0] for line in said}
    assert named >= {"num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "qk_layernorm", "swiglu"}
    assert len(said) > 11
    assert f"t.yaml: model.num_layers: the model in {folder} has 1; got 2; set it to 1" in said
