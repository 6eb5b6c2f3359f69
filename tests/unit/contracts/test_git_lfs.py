"""Files of a git checkout without Git LFS: each kind that Tridock opens is a pointer, and is said to be one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tridock.contracts.data_index import parts_of
from tridock.contracts.git_lfs import pointer_problem, refuse_pointer
from tridock.contracts.pretrained import read_config
from tridock.contracts.safetensors_files import transformers_folder
from tridock.contracts.tokenizers import read_json, read_tokenizer
from tridock.data.dataset.indexed_dataset import write_index
from tridock.data.input.signatures import foreign
from tridock.data.tokenize.sentencepiece import SentencePieceTokenizer
from tridock.data.tokenize.tiktoken import TikTokenizer
from tridock.data.tokenize.tokenizer import open_tokenizer
from tridock.errors import Problem, RequestError
from tridock.node.probes.pretrained import stored_weights
from tridock.node.probes.torch_files import read_named

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 9876543210\n"


def _index(folder: Path) -> None:
    import numpy as np

    write_index(folder / "data.idx", np.dtype("<u2"), np.array([500], "<i4"), np.array([0, 1], "<i8"))


def _vocabulary(path: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    path.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))


def _hf(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _raise(problem: Problem | None) -> None:
    if problem is not None:
        raise RequestError(problem)


KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tokenizer": ("tokenizer.json", read_tokenizer),
    "its configuration": ("tokenizer_config.json", lambda folder: read_json(folder / "tokenizer_config.json")),
    "a tokenizer as --vocab-file": ("t.json", lambda folder: open_tokenizer(folder / "t.json", None)),
    "vocabulary": ("vocab.json", lambda folder: open_tokenizer(folder / "vocab.json", folder / "merges.txt")),
    "merges": (
        "merges.txt",
        lambda folder: [
            _vocabulary(folder / "vocab.json"),
            open_tokenizer(folder / "vocab.json", folder / "merges.txt"),
        ],
    ),
    "SentencePiece": ("tokenizer.model", lambda folder: SentencePieceTokenizer(folder / "tokenizer.model")),
    "tiktoken": ("tekken.json", lambda folder: TikTokenizer(folder / "tekken.json")),
    "configuration": ("config.json", read_config),
    "weights": ("model.safetensors", lambda folder: [_hf(folder), transformers_folder(folder)]),
    "index of weights": ("model.safetensors.index.json", lambda folder: [_hf(folder), transformers_folder(folder)]),
    "weights in a pickle": ("pytorch_model.bin", lambda folder: [_hf(folder), transformers_folder(folder)]),
    "a file of torch.save": ("x.pt", lambda folder: read_named(folder / "x.pt")),
    "DeepSpeed's checkpoint": (
        "mp_rank_00_model_states.pt",
        lambda folder: _raise(stored_weights("deepspeed", folder).problem),
    ),
    "JSON lines": (
        "a.jsonl",
        lambda folder: _raise(foreign(str(folder / "a.jsonl"), POINTER, str(folder / "a.jsonl"))),
    ),
    "index of a data set": (
        "data.idx",
        lambda folder: [(folder / "data.bin").touch(), parts_of(folder / "data", "1,1,1")],
    ),
    "tokens of a data set": ("data.bin", lambda folder: [_index(folder), parts_of(folder / "data", "1,1,1")]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file(tmp_path: Path, kind: str) -> None:
    name, opened = KINDS[kind]
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(RequestError) as error:
        opened(folder)
    pull = f"git -C {shlex.quote(str(folder))} lfs pull --include {name}"
    assert str(error.value) == (
        f"{folder / name}: is a pointer of Git LFS, not the file itself; got a pointer to 9,876,543,210 bytes; "
        f"fetch it: {pull}"
    )


def test_a_name_is_quoted_and_no_pattern(tmp_path: Path) -> None:
    problem = pointer_problem(tmp_path / "a,b [1]*;x.bin", POINTER)
    assert problem is not None
    assert shlex.split(problem.todo.partition(": ")[2])[-1] == "a?b ?1??;x.bin"


@pytest.mark.parametrize(
    "content", [b"", b"version 1\n", b'{"version": "https://git-lfs.github.com/spec/v1"}', b"\xff" * 9]
)
def test_what_is_no_pointer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    refuse_pointer(tmp_path / "x")
