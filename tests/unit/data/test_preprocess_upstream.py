"""Megatron-LM v1.1.5's own tools/preprocess_data.py beside ours: the same command line, the same bytes."""

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.megatron_source import PREPROCESS_DATA, pristine_source
from tests.patience import STEP_S
from tridock.cli import main
from tridock.data.tokenize.encoders import HARD_TEXTS
from tridock.data.tokenize.tokenizer import BytePairTokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("regex", reason="upstream's tokenizer needs it: locks/dev.txt has it")
    if find_spec("torch") is None:  # only upstream's own process imports it
        pytest.skip("upstream's script needs torch")
    return pristine_source(tmp_path_factory.mktemp("upstream") / "source")


def documents(count: int) -> list[str]:
    chance = random.Random(11)
    characters = [chr(code) for code in range(0x3000) if chr(code).isprintable() or chr(code).isspace()]
    arguments = [
        "the ",
        "don't",
        "we'll ",
        "1234 ",
        "\n\n",
        "    ",
        "<|endoftext|>",
        "def f(x):\n",
        "中文 ",
        "🐎",
        "é",
        "'s",
    ]
    mixed = ["".join(chance.choices([*arguments * 30, *characters], k=chance.randrange(1, 80))) for _ in range(count)]
    # A character that came with Unicode 17 is a letter or a sign, depending on the age of upstream's regex package.
    newer = {chr(code) for code in (0x88F, 0xC5C, 0xCDC)}
    return [text for text in [*HARD_TEXTS, *mixed] if not newer & set(text)]


@pytest.mark.parametrize("eod", [True, False])
@pytest.mark.parametrize("keys", [["text"], ["title", "text"]])
def test_the_same_bytes(source: Path, tmp_path: Path, eod: bool, keys: list[str]) -> None:
    texts = documents(300)
    # Upstream's --append-eod ends in an IndexError at an empty document; without it an empty one has no sequence.
    texts += [] if eod else ["", "a", ""]
    tokenizer = BytePairTokenizer.train(texts, 600)
    tokenizer.save(tmp_path)
    lines = [json.dumps({"text": text, "title": text[::-1][:20] or "x", "n": 1}, ensure_ascii=eod) for text in texts]
    # json.dumps leaves U+0085 and the like as they are; in upstream's text mode only \\n, \\r end a line.
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    flags = ["--input", str(tmp_path / "in.jsonl"), "--json-keys", *keys, "--tokenizer-type", "GPT2BPETokenizer"]
    flags += ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    flags += ["--dataset-impl", "mmap", "--workers", "2", "--log-interval", "1000", *["--append-eod"] * eod]
    command = [sys.executable, "-c", PREPROCESS_DATA, str(source), *flags, "--output-prefix", str(tmp_path / "theirs")]
    subprocess.run(command, check=True, capture_output=True, timeout=STEP_S)
    assert main(["data", "preprocess", *flags, "--output-prefix", str(tmp_path / "ours")]) == 0
    for key in keys:
        for suffix in ("bin", "idx"):
            name = f"_{key}_document.{suffix}"
            assert (tmp_path / f"ours{name}").read_bytes() == (tmp_path / f"theirs{name}").read_bytes()
