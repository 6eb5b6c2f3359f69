"""`make bench-data`: `tridock data preprocess` beside Megatron-LM's scripts, same lines, same vocabulary.

v1.1.5's preprocess_data.py gets the first megabytes only (it is slow) and is left out where its source or `regex` is
missing. Today's preprocess_data_fast.py gets everything; it takes ``--megatron-lm``, a checkout of NVIDIA's repository,
and `transformers` on PYTHONPATH; its bytes are compared with ours. Without ``--input`` the corpus is this Python's
library; without ``--vocab-file`` the vocabulary is trained on it. With ``--tokenizer`` the table has a row for each of
these folders (``tokenizer.json``) and each input, of one worker and of today's script, and v1.1.5's is left out.

A program's core-seconds are the user and system time of all its processes and threads, from the start of Python to its
end: imports and the tokenizer's loading count for everyone, but for what today's script imports of a training run
(torch and more), which is left out in its favour. It runs on all cores, having no flag for fewer.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.megatron_source import PREPROCESS_DATA, PREPROCESS_DATA_FAST, pristine_source
from tridock.data.corpus import collect_corpus
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.tokenize.tokenizer import BytePairTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, nargs="+", help="JSON lines; several only with --tokenizer")
    parser.add_argument("--tokenizer", type=Path, nargs="+", help="folders, for HuggingFaceTokenizer")
    parser.add_argument("--vocab-file", type=Path)
    parser.add_argument("--merge-file", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--upstream-mb", type=float, default=10)
    parser.add_argument("--megatron-lm", type=Path, help="a checkout with tools/preprocess_data_fast.py")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.tokenizer:
            _compare_tokenizers(folder, given.tokenizer, given.input or [_corpus(folder)], given.megatron_lm)
            return
        corpus = given.input[0] if given.input else _corpus(folder)
        vocab, merges = (given.vocab_file, given.merge_file) if given.vocab_file else _vocabulary(folder)
        flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(vocab), "--merge-file", str(merges)]
        flags += ["--append-eod"]
        print("program                  workers      MB  core-s  MB/core-s    MB/s  peak MB (largest process)")
        upstream = _upstream(folder, corpus, given.upstream_mb, flags)
        fast = _fast(folder, corpus, given.megatron_lm, vocab, merges) if given.megatron_lm else None
        for workers in given.workers:
            command = [sys.executable, "-m", "tridock.cli", "data", "preprocess", "--input", str(corpus), *flags]
            command += ["--output-prefix", str(folder / "ours"), "--workers", str(workers)]
            command += ["--allow-special"] * (fast is not None)  # as today's script
            rate = _measure("tridock", workers, corpus.stat().st_size, command)
            for name, other in (("preprocess_data.py", upstream), ("preprocess_data_fast.py", fast)):
                if other:
                    print(f"{rate / other:.1f} times the MB of {name} for each second of a core")
        if fast:
            for suffix in ("bin", "idx"):
                ours, theirs = (folder / f"{name}_text_document.{suffix}" for name in ("ours", "fast"))
                if not filecmp.cmp(ours, theirs, shallow=False):
                    raise SystemExit(f"{ours.name} and {theirs.name} differ")
            print("its files are ours, byte for byte")


def _compare_tokenizers(folder: Path, tokenizers: list[Path], corpora: list[Path], source: Path) -> None:
    print("tokenizer, text          workers      MB  core-s  MB/core-s    MB/s  peak MB (largest process)")
    for tokenizer in tokenizers:
        for corpus in corpora:
            flags = ["--input", str(corpus), "--append-eod", "--tokenizer-type", "HuggingFaceTokenizer"]
            flags += ["--tokenizer-model", str(tokenizer)]
            name = f"{tokenizer.name}, {corpus.stem}"
            script = [sys.executable, "-c", PREPROCESS_DATA_FAST, str(source), *flags, "--use-gigatoken"]
            cores, size = len(os.sched_getaffinity(0)), corpus.stat().st_size
            theirs = _measure(f"{name} (today's)", cores, size, [*script, "--output-prefix", str(folder / "fast")])
            command = [sys.executable, "-m", "tridock.cli", "data", "preprocess", *flags, "--workers", "1"]
            command += ["--tokenizer-hf-no-include-special-tokens"]  # as that script
            ours = _measure(name, 1, size, [*command, "--output-prefix", str(folder / "ours")])
            print(f"{name}: {ours / theirs:.1f} times; {_difference(folder)}", flush=True)


def _difference(folder: Path) -> str:
    ours, theirs = (IndexedDataset(folder / f"{name}_text_document") for name in ("ours", "fast"))
    if ours.documents != theirs.documents:
        return f"{ours.documents} documents, theirs {theirs.documents}"
    documents = range(ours.documents)
    bounds = (zip(ours.token_bounds(n, n + 1), theirs.token_bounds(n, n + 1), strict=True) for n in documents)
    differ = [
        number
        for number, ((first, start), (last, end)) in enumerate(bounds)
        if not np.array_equal(ours.tokens[first:last], theirs.tokens[start:end])
    ]
    return f"{len(differ)} of {ours.documents} documents differ: {differ[:5]}" if differ else "equal bytes"


def _corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in collect_corpus(1 << 40)))
    return path


def _vocabulary(folder: Path) -> tuple[Path, Path]:
    BytePairTokenizer.train(collect_corpus(), 16384).save(folder / "tokenizer")
    return folder / "tokenizer" / "vocab.json", folder / "tokenizer" / "merges.txt"


def _upstream(folder: Path, corpus: Path, megabytes: float, flags: list[str]) -> float | None:
    if importlib.util.find_spec("regex") is None:
        return None
    try:
        source = pristine_source(folder / "upstream")
    except pytest.skip.Exception:
        return None
    part = folder / "part.jsonl"
    with corpus.open("rb") as lines, part.open("wb") as file:
        while file.tell() < megabytes * 1e6 and (line := lines.readline()):
            # An empty document with --append-eod ends it.
            if json.loads(line)["text"]:
                file.write(line)
    command = [sys.executable, "-c", PREPROCESS_DATA, str(source), "--input", str(part), *flags]
    return _measure("preprocess_data.py", 1, part.stat().st_size, [*command, "--output-prefix", str(folder / "theirs")])


def _fast(folder: Path, corpus: Path, source: Path, vocab: Path, merges: Path) -> float:
    """Today's script, on gigatoken too. Of what it imports, only the tokenizers and the writer are taken."""
    tokenizer = folder / "hf"
    BytePairTokenizer.from_gpt2(vocab, merges).save(tokenizer)
    (tokenizer / "config.json").write_text('{"model_type": "gpt2"}')
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2TokenizerFast", **end}))
    flags = ["--input", str(corpus), "--output-prefix", str(folder / "fast"), "--append-eod", "--use-gigatoken"]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    command = [sys.executable, "-c", PREPROCESS_DATA_FAST, str(source), *flags]
    return _measure("preprocess_data_fast.py", len(os.sched_getaffinity(0)), corpus.stat().st_size, command)


def _measure(name: str, workers: int, size: int, command: list[str]) -> float:
    started = time.monotonic()
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(run.pid, 0)
    seconds, megabytes = time.monotonic() - started, size / 1e6
    if status:
        raise SystemExit(f"{name} failed: {' '.join(command)}")
    cores = used.ru_utime + used.ru_stime
    rate = megabytes / cores
    print(
        f"{name:24} {workers:7} {megabytes:7.1f} {cores:7.2f} {rate:10.2f} {megabytes / seconds:7.2f} "
        f"{used.ru_maxrss / 1024:8.0f}",
        flush=True,
    )
    return rate


if __name__ == "__main__":
    main()
