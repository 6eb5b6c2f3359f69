"""What takes longer of preprocessing: beside megatron-core's own writer, and killed again and again."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.distributed.ranks import ROOT
from tests.unit.data.test_preprocess import TEXTS, request
from tests.unit.data.test_resumable_build import work
from tridock.data.preprocess import preprocess
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import RequestError


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer.train(TEXTS, 280)


DOCUMENTS = st.lists(st.one_of(st.text(max_size=12), st.lists(st.text(max_size=6), max_size=3)), max_size=14)


@settings(max_examples=15, deadline=None)
@given(documents=DOCUMENTS, split=st.integers(0, 14), size=st.integers(1, 300), eod=st.booleans())
def test_the_same_bytes_as_the_obvious_writer(
    tokenizer: BytePairTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[str | list[str]],
    split: int,
    size: int,
    eod: bool,
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    rows = [json.dumps({"text": document}).encode() + b"\n" for document in documents]
    (folder / "a").write_bytes(b"".join(rows[:split]))
    (folder / "b").write_bytes(gzip.compress(b"".join(rows[split:])))
    obvious(folder / "expected", tokenizer, documents, eod)
    expected = [(folder / f"expected.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    for workers in (1, 2, 3):
        prefix = folder / f"w{workers}"
        wanted = request(tokenizer, prefix, folder / "a", folder / "b", eod=eod, workers=workers, chunk_bytes=size)
        if not expected[0]:
            with pytest.raises(RequestError, match="gives no token"):
                preprocess(wanted)
            continue
        done = preprocess(wanted)
        assert [done.prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")] == expected
        assert (done.documents_in, done.documents_out, done.rejected) == (len(documents), len(documents), 0)


def obvious(prefix: Path, tokenizer: BytePairTokenizer, documents: list[str | list[str]], eod: bool) -> None:
    """Megatron's loop: item by item, an end for each document."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        texts = [document] if isinstance(document, str) else document
        sentences = [ids for ids in map(tokenizer.encode, texts) if ids]
        if eod and sentences:
            sentences[-1].append(tokenizer.end_of_text)
        for ids in sentences:
            builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


KILLED = """
import sys
from pathlib import Path
from tests.unit.data.test_preprocess import request
from tridock.data.preprocess import preprocess
from tridock.data.tokenize.tokenizer import BytePairTokenizer
tokenizer = BytePairTokenizer.load(Path(sys.argv[1]) / "t")
inputs = [Path(name) for name in sys.argv[2:]]
folder = Path(sys.argv[1])
print("go", flush=True)
more = {"resume": True, "workers": 2, "chunk_bytes": 1500, "journal_seconds": 0}
preprocess(request(tokenizer, folder / "w", *inputs, rejects=folder / "r", **more))
"""


def test_killed_at_any_moment_and_resumed(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    sources = work(tmp_path, 1200)
    tokenizer.save(tmp_path / "t")
    preprocess(request(tokenizer, tmp_path / "expected", *sources, rejects=tmp_path / "re"))
    chance = random.Random(7)
    command = [sys.executable, "-c", KILLED, str(tmp_path), *map(str, sources)]
    names = [f"_text_document.{suffix}" for suffix in ("bin", "idx")]
    waits: list[float | None] = [chance.uniform(0, 0.4) for _ in range(9)]
    for wait in [*waits, None]:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert run.stdout is not None
        run.stdout.readline()
        run.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(wait)
        run.kill()
        assert run.wait() in (0, -signal.SIGKILL)
        if list(tmp_path.glob("w*.idx")):  # killed after it was done, or the last time
            for name in names:
                assert (tmp_path / f"w{name}").read_bytes() == (tmp_path / f"expected{name}").read_bytes()
    assert run.returncode == 0
    assert (tmp_path / f"w{names[1]}").exists()
    assert (tmp_path / "r").read_bytes() == (tmp_path / "re").read_bytes()
