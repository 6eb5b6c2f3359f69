"""Exports in llama.cpp: its converter takes every weight, and it predicts what transformers predicts.

``TRIDOCK_LLAMA_CPP`` names a folder with ``convert_hf_to_gguf.py`` and ``gguf-py`` (a clone of llama.cpp, or
``vendor/llama.cpp`` of the source of llama-cpp-python); gguf and xllamacpp, which runs the model, are on PyPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import ROOT
from tests.patience import STEP_S
from tests.unit.train import test_huggingface as folders
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.experiment.model import Model
from tridock.train.huggingface.export import export
from tridock.train.models.gpt import GPT, Shape

LLAMA_CPP = os.environ.get("TRIDOCK_LLAMA_CPP", "")
MISSING = [name for name in ("gguf", "xllamacpp", "transformers") if find_spec(name) is None]
MISSING += [] if LLAMA_CPP else ["TRIDOCK_LLAMA_CPP"]
pytestmark = [
    pytest.mark.full,
    pytest.mark.optional,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)}"),
]
TOKENS = 512
MORE = {
    "gpt2-untied": {**folders.GPT2, **folders.UNTIED},
    "smollm3-of-four": {**folders.LLAMA, "no_rope_freq": 4, "num_layers": 8},
    "qwen2-moe-normalized": {**folders.KINDS["qwen2-moe"], "moe_router_pre_softmax": False},
}
OTHERWISE = {"smollm3", "qwen3-moe-of-one", "qwen2-moe-normalized"}
"""What llama.cpp computes otherwise (docs/guides/serve.md): each is a number or a flag that no GGUF file holds."""
GELU_STEP = 1e-2
"""llama.cpp looks GELU, always the tanh approximation, up in a table of fp16."""


def exported(kind: str, fields: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    width = {"hidden_size": 64, "seq_length": 64} | ({} if "gpt2" in kind else {"ffn_hidden_size": 64})
    heads = {"kv_channels": 32} if "kv_channels" in fields else {}
    experts = {"moe_ffn_hidden_size": 64} if "num_moe_experts" in fields else {}
    torch.manual_seed(1)
    gpt = GPT(Shape.of(Model.model_validate({**fields, **width, **heads, **experts}), TOKENS))
    with torch.no_grad():
        for weight in gpt.parameters():
            weight += 0.15 * torch.randn_like(weight)
    monkeypatch.setattr(folders, "TOKENS", TOKENS)
    BytePairTokenizer.train([path.read_text() for path in (ROOT / "tridock").glob("*.py")], TOKENS).save(folder / "t")
    export(folders.run_of(folder, gpt), folder / "exported", tokenizer=folder / "t", quiet=True)
    return folder / "exported"


@pytest.mark.parametrize("kind", [*folders.KINDS, *MORE])
def test_llama_cpp_predicts_what_transformers_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    import transformers

    fields = {**folders.KINDS, **MORE}[kind]
    folder, file = exported(kind, fields, tmp_path, monkeypatch), tmp_path / "model.gguf"
    # The guide's own words: a tokenizer of train-tokenizer splits as GPT-2's does.
    program = (
        f"import sys; sys.path[:0] = [{LLAMA_CPP!r}, {LLAMA_CPP + '/gguf-py'!r}]\n"
        "from conversion.base import TextModel\nimport convert_hf_to_gguf\n"
        "TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'\nconvert_hf_to_gguf.main()"
    )
    converted = [sys.executable, "-c", program, str(folder), "--outtype", "f32", "--outfile", str(file)]
    subprocess.run(converted, check=True, capture_output=True, timeout=STEP_S)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    taken = [it for it in gguf.GGUFReader(file).tensors if not it.name.startswith("rope_")]
    assert sum(int(it.n_elements) for it in taken) == sum(it.numel() for it in model.parameters())
    prompts = [torch.randint(TOKENS, (1, length)) for length in (1, 2, 5, 11, 23, 40, 63)]
    given = json.dumps([prompt[0].tolist() for prompt in prompts])
    asked = [sys.executable, "-m", "tests.llama_cpp", str(file)]
    done = subprocess.run(asked, input=given, cwd=ROOT, check=True, capture_output=True, text=True, timeout=STEP_S)
    found = json.loads(done.stdout.splitlines()[-1])
    with torch.no_grad():
        wanted = [model(prompt).logits[0, -1].log_softmax(-1) for prompt in prompts]
    pairs = zip(wanted, found, strict=True)
    differences = [abs(it - float(ours[int(token)])) for ours, theirs in pairs for token, it in theirs.items()]
    assert len(differences) >= 60
    limit = GELU_STEP if "gpt2" in kind else 1e-4
    assert max(differences) > 0.05 if kind in OTHERWISE else max(differences) < limit
