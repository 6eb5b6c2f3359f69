"""Samples of text at evaluations: the same from every layout, those of the whole model, and without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.distributed.ranks import (
    VOCABULARY,
    asked_for,
    losses,
    make_data,
    make_run,
    read_lines,
    run_several,
)  # fmt: skip
from tests.distributed.test_shared_models import PP, SCHEDULE, STRATEGY, TP, VPP
from tridock.cli import main
from tridock.data.dataset.manifest import DatasetManifest, write_manifest
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.engines.progress import read_progress
from tridock.train.data.dataset import mixed_seed
from tridock.train.huggingface.generate import built
from tridock.train.huggingface.saved import Saved
from tridock.train.sampling import choose

pytest.importorskip("tokenizers")
pytest.importorskip("megatron.core", exc_type=ImportError)
pytestmark = pytest.mark.distributed

PROMPTS = ("w1 w2 w3", "", " ".join(f"w{number}" for number in range(1, 21)))
"""The last is longer than a sample."""
SAMPLED = {
    "train.sample_prompts": PROMPTS, "train.sample_tokens": 6, "train.train_iters": 4, "train.eval_interval": 2,
    "model.num_layers": 4, "batch.micro_batch_size": 2, "train.eval_iters": 1, "optimizer.lr": 0.02,
}  # fmt: skip
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
CORE = {"engine": "megatron-core", STRATEGY: "ddp"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {"train.save": True}),
    "ddp2": (2, {}),
    "zero0": (2, {STRATEGY: "zero"}),
    "zero3": (2, {STRATEGY: "zero", "parallel.zero_stage": 3}),
    "fsdp": (2, {STRATEGY: "fsdp"}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2}),
    "pp2-interleaved": (2, {PP: 2, VPP: 2, SCHEDULE: "interleaved"}),
    "tp2-pp2": (4, {TP: 2, PP: 2}),
    "tp2-fsdp2": (4, {TP: 2, STRATEGY: "fsdp"}),
    "core": (1, CORE),
    "core-dp2": (2, {**CORE, "parallel.use_distributed_optimizer": True}),
    "core-tp2": (2, {**CORE, TP: 2, "parallel.sequence_parallel": True}),
    "core-cp2": (2, {**CORE, "parallel.context_parallel_size": 2}),
    "core-pp2-vpp2": (2, {**CORE, PP: 2, VPP: 2}),
    "core-tp2-pp2": (4, {**CORE, TP: 2, PP: 2}),
}
MIXTURE = {
    **CORE, "train.save": True, "model.num_moe_experts": 4, "parallel.expert_model_parallel_size": 2,
    "model.moe_shared_expert_intermediate_size": 24,
    "model.swiglu": True, "model.normalization": "RMSNorm", "model.add_bias_linear": False,
    "model.position_embedding_type": "rope", "model.num_query_groups": 2,
    "model.untie_embeddings_and_output_weights": True,
}  # fmt: skip
"""Of Mixtral's shape and with a shared expert; its experts are on two ranks."""
SOME = ("ddp", "fsdp", "pp2-interleaved", "core", "core-pp2-vpp2")
UNCHANGED = {name: {} for name in ("zero0", "zero3", "fsdp", "tp2", "pp2-interleaved", "core-tp2", "core-pp2-vpp2")}
SOME_UNCHANGED = ("pp2-interleaved", "core-pp2-vpp2")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data whose tokenizer lies beside them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("sampled")
    make_data(folder)
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "data" / "tokenizer.json"))
    sha256 = HuggingFaceTokenizer(folder / "data").sha256
    tokens = (folder / "data" / "small.bin").stat().st_size // 2
    counts = {"vocab_size": VOCABULARY, "documents": 240, "tokens": tokens, "end_of_document": 0}
    write_manifest(folder / "data" / "small", DatasetManifest(**counts, tokenizer_sha256=sha256, inputs=()))
    return folder


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, workspace: Path) -> dict[str, Path]:
    found, sizes = {}, {}
    for name, (ranks, fields) in asked_for(request, LAYOUTS, SOME).items():
        own = {**SAMPLED, **fields}
        found[name] = make_run(workspace, name, ranks, **own)
        if name in asked_for(request, UNCHANGED, SOME_UNCHANGED):
            for kind, more in (("with", {}), ("without", {"train.sample_prompts": ()})):
                found[f"{name} {kind}"] = make_run(workspace, f"{name}-{kind}", ranks, **{**own, **DROPOUT, **more})
                sizes[f"{name} {kind}"] = ranks
        sizes[name] = ranks
    found["core-mixture"], sizes["core-mixture"] = make_run(workspace, "mixture", 2, **{**SAMPLED, **MIXTURE}), 2
    for ranks in (1, 2, 4):
        for core in (False, True):
            together = [found[name] for name in found if sizes[name] == ranks and name.startswith("core") == core]
            if together:
                run_several(together, ranks)
    return found


def samples(run: Path) -> list[tuple[int, list[dict[str, str]]]]:
    records = [line for line in read_lines(run / "events.jsonl") if line["event"] == "samples"]
    return [(record["iteration"], record["samples"]) for record in records]


@pytest.mark.parametrize("name", thinned(LAYOUTS, SOME))
def test_every_layout_writes_the_text_of_one_process(runs: dict[str, Path], name: str) -> None:
    found = samples(runs[name])
    assert [iteration for iteration, _ in found] == [2, 4]
    assert [it["prompt"] for it in found[0][1]] == list(PROMPTS)
    assert found == samples(runs["core" if name.startswith("core") else "ddp"])


@pytest.mark.parametrize("name", ["ddp", "core-mixture"])
def test_it_is_the_text_of_the_whole_model(runs: dict[str, Path], name: str) -> None:
    """From the checkpoint, token after token over no more than there is."""
    saved = Saved.open(runs[name])
    model = built(saved, torch.device("cpu"))
    assert saved.tokenizer is not None
    tokenizer = HuggingFaceTokenizer(saved.tokenizer)
    (last,) = runs[name].glob("checkpoints/iter_*4")
    assert read_progress(last).tokenizer_sha256 == saved.made_with == tokenizer.sha256
    wanted = []
    for row, prompt in enumerate(PROMPTS):
        ids, own = tokenizer.encode([prompt])[0].tolist() or [0], []
        for number in range(6):
            with torch.no_grad():
                logits = model(torch.tensor([(ids + own)[-16:]]))[0, -1, :VOCABULARY]
            seed = mixed_seed(1234, row, number) >> 1
            token = int(choose(logits, generator=torch.Generator().manual_seed(seed)))
            if token == 0:
                break
            own.append(token)
        wanted.append("".join(f" w{token}" for token in own))
    found = [it["text"] for it in samples(runs[name])[-1][1]]
    assert [text.split() for text in found] == [text.split() for text in wanted]
    assert all(found)


@pytest.mark.full  # the layouts' own samples above
def test_generate_continues_a_prompt_with_experts_of_several_ranks(
    runs: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(runs["core-mixture"])
    assert main(["generate", run, "--prompt", "w1 w2 w3", "--temperature", "0", "--max-new-tokens", "4"]) == 0
    text, model = capfd.readouterr().out.strip(), built(Saved.open(runs["core-mixture"]), torch.device("cpu"))
    ids = [1, 2, 3]
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1, :VOCABULARY].argmax()))
    assert 0 not in ids
    assert text.split() == [f"w{token}" for token in ids]


@pytest.mark.parametrize("name", thinned(UNCHANGED, SOME_UNCHANGED))
def test_samples_change_no_loss(runs: dict[str, Path], name: str) -> None:
    pair = [runs[f"{name} {kind}"] for kind in ("with", "without")]
    assert losses(pair[0]) == losses(pair[1])
    assert [bool(samples(run)) for run in pair] == [True, False]
