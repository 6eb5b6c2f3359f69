"""Where the tests find Megatron-LM v1.1.5: its code is not part of this repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

COMMIT = "e7c8cb767acddba8ad5d2c41fe18e30de7870d30"
FOLDER = "megatron/Megatron-LM-v1.1.5-3D_parallelism"
PATCHES = sorted((Path(__file__).parents[1] / "patches" / "megatron-v1.1.5").glob("*.patch"))
REMEDY = (
    "git init -q /tmp/megatron && git -C /tmp/megatron fetch -q --depth 1"
    f" https://github.com/deepspeedai/DeepSpeedExamples.git {COMMIT}"
    " && git -C /tmp/megatron update-ref HEAD FETCH_HEAD && export TRIDOCK_MEGATRON=/tmp/megatron"
)

PREPROCESS_DATA = """
import runpy, sys, types
import numpy
numpy.float = float
source = sys.argv.pop(1)
megatron, data, nltk, six = map(types.ModuleType, ("megatron", "megatron.data", "nltk", "six"))
megatron.__path__, data.__path__, megatron.print_rank_0 = [f"{source}/megatron"], [f"{source}/megatron/data"], print
nltk.tokenize = types.SimpleNamespace(punkt=types.SimpleNamespace(PunktLanguageVars=object))
sys.modules |= {"megatron": megatron, "megatron.data": data, "nltk": nltk, "six": six}
sys.argv[0] = f"{source}/tools/preprocess_data.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs upstream's tools/preprocess_data.py: argv is upstream's folder and the script's flags. Its package imports what
only a training run needs, its numpy and nltk are of their day: stand-ins for those. What it does is not replaced."""


PREPROCESS_DATA_FAST = """
import runpy, sys, types
source = sys.argv.pop(1)
sys.path.insert(0, source)
names = ("megatron.core", "megatron.training", "megatron.training.arguments")
core, training, arguments = map(types.ModuleType, names)
core.__path__, training.__path__ = [f"{source}/megatron/core"], []
def add(parser):
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--tokenizer-model")
    parser.add_argument("--use-gigatoken", action="store_true")
    absent = ("vocab_file", "merge_file", "special_tokens", "chat_template", "vocab_size", "metadata_path")
    off = ("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens", "trust_remote_code", "pad_vocab_size")
    parser.set_defaults(**dict.fromkeys(absent), **dict.fromkeys(off, False))
    return parser
arguments._add_tokenizer_args = add
sys.modules |= dict(zip(names, (core, training, arguments)))
sys.argv[0] = f"{source}/tools/preprocess_data_fast.py"
import megatron.core.parallel_state
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs today's tools/preprocess_data_fast.py: argv is upstream's folder and the script's flags. Of all the arguments
of a training run it takes those of the tokenizer, and it imports no more of megatron.core than it uses."""


def pristine_source(target: Path) -> Path:
    """A copy of upstream's folder without any patch, from ``TRIDOCK_MEGATRON``: that folder, or a git repository."""
    given = os.environ.get("TRIDOCK_MEGATRON")
    if not given:
        pytest.skip(f"the source of Megatron-LM v1.1.5 is not at hand; {REMEDY}")
    target.mkdir(parents=True)
    if (Path(given) / "pretrain_gpt2.py").is_file():
        subprocess.run(["cp", "-r", f"{given}/.", str(target)], check=True)
        return target
    archive = subprocess.run(["git", "-C", given, "archive", COMMIT, FOLDER], check=True, capture_output=True)
    unpack = ["tar", "-x", "-C", str(target), f"--strip-components={FOLDER.count('/') + 1}"]
    subprocess.run(unpack, input=archive.stdout, check=True)
    return target


def apply_patch(patch: Path, source: Path) -> None:
    """``git apply``, as the image's build does it; nothing where the source has the patch already."""
    command = ["git", "-C", str(source), "apply"]
    # Outside of any repository: within one, git apply skips what lies outside of its index, and says nothing.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(source.parent)}
    undone = subprocess.run([*command, "--reverse", "--check", str(patch)], env=env, check=False, capture_output=True)
    if undone.returncode:
        subprocess.run([*command, str(patch)], env=env, check=True)


def patched_source(target: Path) -> Path:
    """Upstream's folder with the series applied: what the image holds."""
    pristine_source(target)
    for patch in PATCHES:
        apply_patch(patch, target)
    return target
