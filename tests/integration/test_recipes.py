"""The recipes (configs/recipes) on two nodes, with a tiny model. What they install comes from the package index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.integration.support import wait_until
from tests.integration.twin import NODES, Twin, two_nodes
from tests.patience import WORK_S

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {"model_name_or_path": "/workspace/data/model", "use_cpu": True, "max_length": 64, "warmup_steps": 1}


def write_model(folder: Path) -> None:
    """A tiny Llama, with a tokenizer of bytes and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=259, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(["a text"], trainer)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=259, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def twin(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    folder = tmp_path_factory.mktemp("twin")
    write_model(folder / "data" / "model")
    with two_nodes(cpu_image, folder) as made:
        yield made


def with_values(file: Path, values: Mapping[str, Any]) -> None:
    """Changes keys of a YAML file, as a user would."""
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **values}))


def recipe(twin: Twin, name: str, **values: Any) -> Path:
    """A recipe's folder with the tiny model."""
    folder = twin.folder / "recipes" / f"{name}-{len(list(twin.folder.glob('recipes/*')))}"
    done = twin.alone("init", "--recipe", name, str(folder))
    assert done.returncode == 0, done.stderr
    with_values(folder / f"{name}.yaml", {**SMALL, **values})
    return folder


def run_id_of(output: str) -> str:
    found = re.search(r"^run (\S+): ", output, re.MULTILINE)
    assert found, output
    return found[1]


@pytest.mark.full  # test_run.py: a smaller program; tests/distributed/test_reproduce.py
@pytest.mark.parametrize(
    ("name", "file", "written"),
    [
        ("sft", "run.yaml", "model.safetensors"),
        ("sft", "run-zero3.yaml", "model.safetensors"),
        ("lora", "run.yaml", "adapter_model.safetensors"),
        ("dpo", "run.yaml", "model.safetensors"),
    ],
)
def test_it_trains_and_gives_the_same_losses_again(twin: Twin, name: str, file: str, written: str) -> None:
    rate = 1e-2 if name == "lora" else 1e-3
    folder = recipe(twin, name, num_train_epochs=8, gradient_accumulation_steps=1, learning_rate=rate)
    done = twin.tridock("run", "--config", str(folder / file))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    run = twin.folder / "runs" / (run_id := run_id_of(output))
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.95 * losses[0], losses
    assert (run / "output" / written).is_file()
    if name == "sft":
        model = transformers.AutoModelForCausalLM.from_pretrained(run / "output")
        before = transformers.AutoModelForCausalLM.from_pretrained(twin.folder / "data" / "model")
        assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert twin.processes(run_id) == ""
    again = twin.tridock("reproduce", "--run", run_id, "--yes")
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.full
def test_it_continues_from_a_checkpoint_as_its_page_says(twin: Twin) -> None:
    folder = recipe(twin, "sft", num_train_epochs=8, gradient_accumulation_steps=1, save_steps=4)
    again = "torchrun -m trl.scripts.sft --config sft.yaml --resume_from_checkpoint ../output/checkpoint-12"
    first = twin.tridock("run", "--config", str(folder / "run.yaml"), "--resume-command", again)
    assert first.returncode == 0, first.stderr
    run_id = run_id_of(first.stdout + first.stderr)
    metrics = twin.folder / "runs" / run_id / "metrics.jsonl"
    done = twin.tridock("resume", "--run", run_id, "--yes")
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert losses[-4:] == losses[12:16]
    assert len(losses) == 16 + 4


@pytest.mark.full  # tests/integration/test_run.py: the same with a smaller program
def test_a_killed_rank_is_named_and_stop_leaves_nothing(twin: Twin) -> None:
    folder = recipe(twin, "sft", num_train_epochs=100_000, save_strategy="no")

    def training() -> str:
        done = twin.tridock("run", "--config", str(folder / "run.yaml"), "--detach")
        assert done.returncode == 0, done.stderr
        metrics = twin.folder / "runs" / (run_id := run_id_of(done.stdout + done.stderr)) / "metrics.jsonl"
        wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 0, f"{run_id} trains", WORK_S)
        return run_id

    run_id = training()
    twin.sh(NODES[1], "pkill -9 -f -- '-u -m trl.scripts.sft'")
    assert "rank 1 on node-2 was ended by SIGKILL" in twin.followed(run_id)
    run_id = training()
    assert twin.tridock("stop", "--run", run_id).returncode == 0
    wait_until(lambda: twin.processes(run_id) == "", "nothing is left")


@pytest.mark.full  # tests/distributed/test_pretrained.py
def test_pretraining_continues_from_a_folder_of_transformers(twin: Twin) -> None:
    folder = twin.folder / "continue-pretraining"
    assert twin.alone("init", "--recipe", folder.name).returncode == 0
    (twin.folder / "texts.jsonl").write_text(
        "".join(f'{{"text": "{number} green bottles"}}\n' for number in range(4000))
    )
    tokens = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "data/model", "--append-eod")
    done = twin.alone("data", "preprocess", "--input", "texts.jsonl", "--output-prefix", "data/texts", *tokens)
    assert done.returncode == 0, done.stderr
    changes = ("model.seq_length=64", "parallel.tensor_model_parallel_size=1", "batch.global_batch_size=4")
    changes += ("precision=fp32", "train.train_iters=6", "train.eval_interval=6", "train.save_interval=6")
    options = [word for change in (*changes, "optimizer.lr_warmup_iters=1") for word in ("--set", change)]
    done = twin.tridock("launch", "--config", str(folder / "run.yaml"), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(done.stdout + done.stderr)
    done = twin.tridock("export", run_id, "-o", "trained")
    assert done.returncode == 0, done.stderr
    trained = transformers.AutoModelForCausalLM.from_pretrained(twin.folder / "trained")
    assert trained.config.num_hidden_layers == 2
