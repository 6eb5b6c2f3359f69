"""Your own copies of upstream's scripts of Megatron-LM v1.1.5, with your own DeepSpeed JSON, as in the image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import WORK_S
from tridock.data.corpus import prepare_demo

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
CHANGES = {
    "GPUS_PER_NODE=8": "GPUS_PER_NODE=2",
    "NLAYERS=24": "NLAYERS=2",
    "--num-layers 24": "--num-layers 2",
    "NHIDDEN=1024": "NHIDDEN=64",
    "--hidden-size 1024": "--hidden-size 64",
    "mp_size=4": "mp_size=1",
    "--seq-length 1024": "--seq-length 64",
    "--max-position-embeddings 1024": "--max-position-embeddings 64",
    "--num-attention-heads 16": "--num-attention-heads 4",
    r"--train-iters \d+": "--train-iters 4",
    r"--log-interval \d+": "--log-interval 2",
    "\nDATA_PATH=.*": "\nDATA_PATH=$PWD/../data/demo/stdlib_text_document",
    "(VOCAB_PATH=.*/|--vocab-file )gpt2-vocab": r"\1$PWD/../data/demo/tokenizer/vocab",
    "(MERGE_PATH=.*/|--merge-file )gpt2-merges.txt": r"\1$PWD/../data/demo/tokenizer/merges.txt",
    "=data/": "=",
    "CHECKPOINT_PATH=.*": "CHECKPOINT_PATH=$PWD/saved",
    " pretrain_gpt2.py": " ../pretrain_gpt2.py",
}


@pytest.mark.parametrize(
    "script", ["ds_pretrain_gpt2.sh", pytest.param("pretrain_gpt2_distributed.sh", marks=pytest.mark.full)]
)
def test_a_changed_copy_trains_with_upstreams_options(script: str, source: Path, tmp_path: Path) -> None:
    prepare_demo(tmp_path / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=1_000_000)
    shutil.copy(ROOT / "entrypoint" / "pretrain_gpt2.py", tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    own = (source / "examples" / "ds_zero_stage_2_config.json").read_text()
    (mine / "ds_zero_stage_2_config.json").write_text(own.replace("2048", "18"))
    text = (source / "examples" / script).read_text()
    for old, new in CHANGES.items():
        text = re.sub(old, new, text)
    (mine / script).write_text(text)
    cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRIDOCK_MEGATRON": str(source), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", script], cwd=mine, env=os.environ | cpu, capture_output=True, text=True, timeout=WORK_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.findall(r" iteration +(\d+)/ +4 ", done.stdout) == ["2", "4"]
    (loss,) = re.findall(r"end of training for val data .* value: ([\d.E+-]+) ", done.stdout)
    assert 4.0 < float(loss) < 9.0
    assert (mine / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"
