"""docs/guides/llama.md, line by line, in the image as an ordinary user: from raw text to a folder for transformers."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.documentation import Block, blocks
from tests.integration.support import execute, give
from tridock.experiment import parse_experiment

pytestmark = pytest.mark.full  # tests/unit/test_docs_commands.py reads and previews them

PAGE = "docs/guides/llama.md"
RUN = "mine-20261122-110613-14b7"
QWEN = "models/Qwen3-0.6B"  # cannot be downloaded here
MORE = """
text = tokenizer(open("raw/corpus.jsonl").read(3000), return_tensors="pt")
print("loss", float(model(**text, labels=text.input_ids).loss))
"""


def run(block: Block, folder: Path, image: str) -> str:
    """What the block prints: Python's where transformers is installed, the shell's in the image, as user 1000."""
    if block.language == "python":
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = execute(sys.executable, "-c", block.text + MORE, cwd=folder, env=env)
    else:
        first = next(iter(sorted(path.name for path in folder.glob("runs/mine-*"))), "")
        text = block.text.replace(RUN, first).replace(QWEN, "exported")
        options = ("--user", "1000:1000", "--shm-size", "1g", "--volume", f"{folder}:/workspace")
        done = execute("docker", "run", "--rm", *options, image, "bash", "-euo", "pipefail", "-c", text)
    assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "split" not in line]


def test_every_line(cpu_image: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    give(tmp_path, 1000)
    kinds, printed, engines, experiment = [], [], [], {}
    for block in blocks(PAGE):
        kinds.append(block.language)
        if block.language == "yaml":
            shown = yaml.safe_load(block.text.replace(QWEN, str(tmp_path / "exported")))
            experiment = shown if "name" in shown else experiment | shown  # the last one shows one field
            engines.append(parse_experiment(yaml.safe_dump(experiment), str(block)).engine)
        else:
            printed.append(run(block, tmp_path, cpu_image))
    assert kinds == ["sh", "sh", "sh", "python", "yaml", "sh", "sh", "sh", "yaml", "yaml", "sh", "sh"]
    assert engines == ["megatron-core", "torch", "torch"]
    _, _, _, loaded, _, _, _, _, generated = printed
    assert loaded.startswith("def main():")
    trained, resumed = (losses(folder) for folder in sorted(tmp_path.glob("runs/mine-*")))
    (loss,) = map(float, re.findall(r"^loss (.*)", loaded, re.MULTILINE))
    assert loss < 0.9 * trained[0]
    assert resumed[0] == pytest.approx(trained[-1], rel=0.1) != pytest.approx(trained[0], rel=0.1)
    assert "def main():" in generated
    assert "Once upon a time" in generated
    (whole,) = tmp_path.glob("exported/*.safetensors")
    (half,) = tmp_path.glob("exported-bf16/*.safetensors")
    assert half.stat().st_size == pytest.approx(whole.stat().st_size / 2, rel=0.01)
