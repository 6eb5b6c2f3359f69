"""`tridock train` refuses before any rank starts what its files cannot be."""

from __future__ import annotations

import io
import json
import math
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tridock.cli import main
from tridock.contracts import run_folder
from tridock.contracts.supervision import Supervision
from tridock.contracts.tokenizers import sha256s_in
from tridock.experiment import load_experiment
from tridock.experiment.transformers_config import config_of
from tridock.experiment.transformers_weights import transformers_shapes
from tridock.ops.runs import local_run, this_machine
from tridock.ops.runs.prepare import prepare
from tridock.plan import Assumptions

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    experiment = {
        "name": "t",
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 16},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t"},
        "precision": "fp32",
        "train": {"train_iters": 1, "save": False, "tensorboard": False},
    }
    path.write_text(json.dumps(experiment))
    return path


def train(config: Path, *arguments: str) -> tuple[int, str]:
    with redirect_stderr(io.StringIO()) as stderr:
        code = main(["train", str(config), "--workspace", str(config.parent), *arguments])
    return code, stderr.getvalue()


def test_data_that_are_not_there(config: Path) -> None:
    todo = f"copy it into {config.parent}, or make it: tridock data"
    assert train(config) == (
        2,
        f"{config}: data.data_path: is not on this machine; got data/t.bin; {todo}\n"
        f"{config}: data.data_path: is not on this machine; got data/t.idx; {todo}\n",
    )
    assert not (config.parent / "runs").exists()


def test_images_that_are_not_there(tmp_path: Path) -> None:
    config = Path(shutil.copy(ROOT / "configs" / "resnet50.yaml", tmp_path))
    todo = f"copy it into {tmp_path}, or make it: docs/torch.md"
    assert train(config) == (
        2,
        f"{config}: data.data_path: is not on this machine; got data/imagenet_images.npy; {todo}\n"
        f"{config}: data.data_path: is not on this machine; got data/imagenet_labels.npy; {todo}\n",
    )


def test_data_that_are_too_short(config: Path) -> None:
    with IndexedDatasetWriter(config.parent / "data" / "t", 7) as writer:
        writer.add_document([1, 2, 3])
    (config.parent / "data" / "t.json").write_text('{"vocab_size": 7, "tokens": 3}')
    assert train(config) == (
        2,
        f"{config}: data.split: leaves the train split less than one sample of 17 tokens; got 3 tokens in 1 of 1 "
        "documents of data/t; give it a larger share, use more text, or shorten model.seq_length\n",
    )


@pytest.fixture
def two_tokenizers(config: Path) -> Path:
    """Data of one tokenizer, and a model folder with another one, of the same size."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    texts, folder = config.parent / "t.jsonl", config.parent
    texts.write_text('{"text": "abc cab"}\n' * 20)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for place, order in (("made", alphabet), ("model", alphabet[::-1])):
        vocab = {token: number for number, token in enumerate([*order, "<|endoftext|>"])}
        tokenizer = Tokenizer(models.BPE(vocab, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        (folder / place).mkdir()
        tokenizer.save(str(folder / place / "tokenizer.json"))
    argv = ["--input", str(texts), "--output-prefix", str(folder / "data" / "t"), "--workers", "1"]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "made")]
    (folder / "data").mkdir()
    assert main(["data", "preprocess", "--quiet", *argv]) == 0
    for suffix in (".bin", ".idx", ".json"):
        (folder / "data" / f"t_text_document{suffix}").rename(folder / "data" / f"t{suffix}")
    experiment = load_experiment(config)
    model = experiment.model.model_copy(update={"vocab_size": 257})
    (folder / "model" / "config.json").write_text(json.dumps(config_of(model, 257, "float32", {"eos_token_id": 256})))
    header, end = {}, 0
    for name, shape in transformers_shapes(model, 257).items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    (folder / "model" / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(end))
    return config


def checked(config: Path, *overrides: str) -> None:
    prepare(config, {"localhost": [0]}, Assumptions(), ["train.load=hf:model", *overrides]).with_files_of(config.parent)


def test_data_of_another_tokenizer_than_the_weights(two_tokenizers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = two_tokenizers, two_tokenizers.parent
    made, there = (sha256s_in(folder / place)[0] for place in ("made", "model"))
    assert json.loads((folder / "data" / "t.json").read_text())["tokenizer_sha256"] == made != there
    assert train(config, "--set", "train.load=hf:model") == (
        2,
        f"{config}: train.load: goes with another tokenizer than data/t, which was made with that of sha256 {made}; "
        f"got hf:model with {there}; use data of its tokenizer; or if the ids mean the same, set "
        "launch.allow_other_tokenizer to true\n",
    )
    assert not (folder / "runs").exists()
    checked(config, "launch.allow_other_tokenizer=true")
    shutil.copy(folder / "made" / "tokenizer.json", folder / "model")
    checked(config)
    assert "tokenizer" not in capsys.readouterr().err


def test_data_and_weights_whose_tokenizer_is_not_known(
    two_tokenizers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = two_tokenizers, two_tokenizers.parent
    says = f"warning: {config}: train.load: was not checked to go with the tokenizer that made data/t; got "
    (folder / "model" / "tokenizer.json").unlink()
    checked(config)
    assert capsys.readouterr().err == f"{says}no tokenizer in hf:model; make sure of it yourself\n"
    (folder / "data" / "t.json").unlink()
    checked(config, "model.vocab_size=257")
    assert capsys.readouterr().err == f"{says}no tokenizer_sha256 in data/t.json; make sure of it yourself\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", "0"), "--nproc: must be at least 1; got 0; give the number of ranks"),
        (("--nnodes", "0"), "--nnodes: must be at least 1; got 0; give the number of nodes"),
        (("--nnodes", "2", "--node-rank", "2"),
         "--node-rank: is not one of 2 nodes; got 2; use 0 to 1\n"
         "--master-addr: is needed for 2 nodes; got nothing; "
         "give the address of the node of rank 0, as the others reach it"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(config: Path, arguments: tuple[str, ...], message: str) -> None:
    assert train(config, *arguments) == (2, f"{message}\n")


def test_more_ranks_than_gpus(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "_listed", lambda: ("GPU-83a1d6de",))
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    message = (
        "--nproc: each rank needs its own GPU; got 2; "
        "this machine has 1: give as many or fewer, or train on the CPU with DS_ACCELERATOR=cpu\n"
    )
    assert train(config, "--nproc", "2") == (2, message)
    # Then the next thing is missing.
    for arguments in (("--nproc", "1"), ("--nproc", "2", "--set", "env.DS_ACCELERATOR=cpu")):
        assert "data.data_path: is not on this machine" in train(config, *arguments)[1]


def test_nodes_that_are_started_by_hand_are_not_restarted(config: Path) -> None:
    arguments = ["--set", "restart.max=1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    assert train(config, *arguments) == (
        2,
        f"{config}: restart.max: cannot be for nodes that are each started by hand; got 1; "
        "set it to 0, or start them with tridock launch\n",
    )


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_is_without_the_output_of_the_run(
    tmp_path: Path, quiet: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "node"
    script.write_text('#!/bin/sh\n[ "$1" != follow ] || { echo iteration 1/1; echo an error >&2; }\n')
    script.chmod(0o755)
    monkeypatch.setattr(local_run, "node_argv", lambda: [str(script)])
    run = Supervision("localhost", {}, (), master_port=1, hang_timeout_s=0.0)
    (tmp_path / run_folder.SUPERVISION).write_text(run.to_json())
    assert local_run.start_and_follow(tmp_path, 2, quiet=quiet) == 0
    said = "hang limit: none: launch.hang_timeout is 0\niteration 1/1\n"
    assert capfd.readouterr() == ("" if quiet else said, "an error\n")
