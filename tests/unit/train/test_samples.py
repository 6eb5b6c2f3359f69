"""Which tokens become which sample of which rank; and the messages about data."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataset_writer import IndexedDatasetWriter
from tests.unit.train.experiments import experiment
from tridock.contracts.data_index import split_bounds
from tridock.data.dataset.manifest import DatasetManifest, write_manifest
from tridock.errors import RequestError
from tridock.train.data.dataset import Samples, mixed_seed, shuffled
from tridock.train.data.splits import load_splits


def make_data(workspace: Path, documents: int = 100, length: int = 20, vocab_size: int = 500) -> None:
    with IndexedDatasetWriter(workspace / "data/x", vocab_size) as writer:
        for number in range(documents):
            writer.add_document([(number * length + place) % vocab_size for place in range(length)])


def make_manifest(workspace: Path, vocab_size: int, tokens: int = 2000) -> None:
    manifest = DatasetManifest(
        vocab_size=vocab_size, documents=100, tokens=tokens, tokenizer_sha256="", end_of_document=None, inputs=()
    )
    write_manifest(workspace / "data/x", manifest)


def message(workspace: Path, **fields: object) -> str:
    with pytest.raises(RequestError) as caught:
        load_splits(experiment(**fields), workspace)
    return str(caught.value)


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_a_shuffle_is_a_permutation(size: int, seed: int) -> None:
    assert sorted(shuffled(place, size, seed) for place in range(size)) == list(range(size))


def test_shuffles_differ_and_mix() -> None:
    orders = {tuple(shuffled(place, 1000, mixed_seed(7, epoch)) for place in range(1000)) for epoch in range(5)}
    assert len(orders) == 5
    for order in orders:
        # Neighbours do not stay neighbours, and the first half does not stay in front.
        assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 20
        assert 200 < sum(place < 500 for place in order[:500]) < 300


def test_large_splits_need_no_table() -> None:
    size = 10**12
    places = {shuffled(place, size, 3) for place in range(1000)}
    assert len(places) == 1000
    assert max(places) < size


def test_one_epoch_reads_every_token_once() -> None:
    tokens = np.arange(8 * 10 + 5, dtype=np.uint16)  # the five left over never fill a sample
    samples = Samples("train", tokens, seq_length=8, vocab_size=500, seed=1)
    assert samples.per_epoch == 10
    for epoch in range(3):
        found = [samples[epoch * 10 + place] for place in range(10)]
        assert {sample.dtype for sample in found} == {np.dtype(np.int64)}
        assert sorted(token for sample in found for token in sample[:-1].tolist()) == list(range(80))
        assert all((np.diff(sample) == 1).all() and len(sample) == 9 for sample in found)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    samples = Samples("train", np.arange(1000, dtype=np.uint16), 8, 1000, seed=5)
    of_ranks = [list(samples.batches(16, 8, 2, rank, ranks)) for rank in range(ranks)]
    assert {len(batches) for batches in of_ranks} == {4 // ranks}
    assert {batch.shape for batches in of_ranks for batch in batches} == {(2, 9)}
    in_turn = [row for turn in zip(*of_ranks, strict=True) for batch in turn for row in batch.tolist()]
    assert in_turn == [samples[number].tolist() for number in range(16, 24)]


@pytest.mark.parametrize(
    ("documents", "split", "expected"),
    [
        (1000, "949,50,1", (0, 949, 999, 1000)),
        (10, "8,1,1", (0, 8, 9, 10)),
        (10, "1,0,0", (0, 10, 10, 10)),
        (7, "0.5,0.25,0.25", (0, 4, 5, 7)),
        (0, "949,50,1", (0, 0, 0, 0)),
    ],
)
def test_documents_are_divided(documents: int, split: str, expected: tuple[int, ...]) -> None:
    assert split_bounds(documents, split) == expected


def test_splits_are_whole_documents(tmp_path: Path) -> None:
    make_data(tmp_path)
    make_manifest(tmp_path, 500)
    splits = load_splits(experiment(), tmp_path)
    assert {name: len(split.tokens) for name, split in splits.items()} == {"train": 1600, "valid": 200, "test": 200}
    assert {split.vocab_size for split in splits.values()} == {500}
    assert splits["valid"].tokens[0] == 80 * 20 % 500
    assert len({split.seed for split in splits.values()}) == 3


def test_the_vocabulary(tmp_path: Path) -> None:
    make_data(tmp_path)
    assert message(tmp_path) == (
        "model.vocab_size: is left out, and data/x.json beside the data does not say it; "
        "add it, or make the data with `tridock data preprocess`, which writes it down"
    )
    assert load_splits(experiment(**{"model.vocab_size": 600}), tmp_path)["train"].vocab_size == 600
    make_manifest(tmp_path, 500)
    assert message(tmp_path, **{"model.vocab_size": 499}) == (
        "model.vocab_size: is smaller than the tokenizer of the data, which has 500 tokens; got 499; "
        "leave it out, or raise it"
    )
    assert load_splits(experiment(**{"model.vocab_size": 512}), tmp_path)["train"].vocab_size == 512


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    make_data(tmp_path)
    train = load_splits(experiment(**{"model.vocab_size": 100}), tmp_path)["train"]
    with pytest.raises(RequestError) as caught:
        [train[number] for number in range(train.per_epoch)]
    assert str(caught.value).startswith("model.vocab_size: is too small for the data; got 100, and token ")
    assert str(caught.value).endswith(
        " in the train split; leave it out, or give the size of the tokenizer of the data"
    )


def test_a_manifest_of_other_data(tmp_path: Path) -> None:
    make_data(tmp_path)
    make_manifest(tmp_path, 500, tokens=1999)
    assert message(tmp_path) == (
        "data/x.json: belongs to other data: the .bin holds 2000 tokens; got 1999 tokens; "
        "copy all three files again, or build them again with `tridock data preprocess`"
    )


def test_too_little_data(tmp_path: Path) -> None:
    make_data(tmp_path, documents=3, length=4)
    fields = {"model.vocab_size": 500, "data.split": "1,0,2", "train.eval_interval": 5}
    todo = "give it a larger share, use more text, or shorten model.seq_length"
    assert message(tmp_path, **fields) == (
        f"data.split: leaves the train split less than one sample of 9 tokens; "
        f"got 4 tokens in 1 of 3 documents of data/x; {todo}\n"
        f"data.split: leaves the valid split less than one sample of 9 tokens; "
        f"got 0 tokens in 0 of 3 documents of data/x; {todo}"
    )
