"""From which data set each sample of a blend comes; and the messages about blends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tests.unit.train.experiments import experiment
from tridock.data.dataset.manifest import DatasetManifest, write_manifest
from tridock.errors import RequestError
from tridock.experiment.data_sets import BLOCK
from tridock.train.data.blend import BlendedSamples, blending_order
from tridock.train.data.splits import load_splits

VOCABULARY = 60_000


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Data set n has the tokens from n * 10,000; a sample of 8 tokens begins at each eighth."""
    for number, documents in enumerate((40, 20, 10)):
        with IndexedDatasetWriter(tmp_path / f"data/{'abc'[number]}", VOCABULARY) as writer:
            for document in range(documents):
                first = number * 10_000 + document * 41
                writer.add_document(range(first, first + 41))
    return tmp_path


def blend(workspace: Path, data_path: Any, part: str = "train", **fields: Any) -> BlendedSamples:
    given = {"model.vocab_size": VOCABULARY, "data.data_path": data_path, "data.split": "80,20,0"}
    found = load_splits(experiment(**{**given, **fields}), workspace)[part]
    assert isinstance(found, BlendedSamples)
    return found


def source(sample: np.ndarray[Any, Any]) -> str:
    numbers = set((sample // 10_000).tolist())
    assert len(numbers) == 1
    return "abc"[numbers.pop()]


def test_weights_hold_at_every_moment(workspace: Path) -> None:
    samples, weights = blend(workspace, (0.7, "data/a", 2, "data/b", 0.3, "data/c")), {"a": 0.7, "b": 2, "c": 0.3}
    taken: Counter[str] = Counter()
    for number in range(600):
        taken[source(samples[number])] += 1
        for name, weight in weights.items():
            assert abs(taken[name] - weight / 3 * (number + 1)) <= 1.5
    later = Counter(samples.place(number)[0] for number in range(BLOCK * 5, BLOCK * 6))
    assert [later[number] for number in range(3)] == pytest.approx([2333.3, 6666.7, 1000], abs=1)


def test_each_data_set_is_read_in_turn_wherever_a_run_begins(workspace: Path) -> None:
    samples = blend(workspace, (0.7, "data/a", 0.3, "data/b"))
    expected = [0, 0]
    for number in range(2 * BLOCK + 10):
        part, own = samples.place(number)
        assert own == expected[part]
        expected[part] += 1
    alone = blend(workspace, (0.5, "data/a", 0.5, "data/b")).parts[0]
    assert (samples.parts[0][5] == alone[5]).all()
    assert samples.parts[0].seed != samples.parts[1].seed
    again = blend(workspace, (0.7, "data/a", 0.3, "data/b"))
    assert all((again[number] == samples[number]).all() for number in (12_345, 3, 10**9))


def test_ranks_share_a_step_as_of_one_data_set(workspace: Path) -> None:
    samples = blend(workspace, ("data/a", "data/b"))
    for ranks in (1, 2, 4):
        read = [list(samples.batches(24, 8, 2, rank, ranks)) for rank in range(ranks)]
        rows = [batch for turn in zip(*read, strict=True) for batch in turn]
        assert (np.concatenate(rows) == np.stack([samples[number] for number in range(24, 32)])).all()


def test_without_weights_an_epoch_has_every_sample_once(workspace: Path) -> None:
    samples = blend(workspace, ("data/a", "data/b", "data/c"))
    assert samples.per_epoch == sum(part.per_epoch for part in samples.parts)
    epochs = [range(epoch * samples.per_epoch, (epoch + 1) * samples.per_epoch) for epoch in range(3)]
    seen = [[int(samples[number][0]) for number in epoch] for epoch in epochs]
    assert len({*seen[0]}) == samples.per_epoch
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(seen[2])
    assert seen[0] != seen[1]
    assert len({source(samples[number]) for number in range(100)}) == 3


def test_one_data_set_with_a_weight_is_that_data_set(workspace: Path) -> None:
    given = {"model.vocab_size": VOCABULARY, "data.split": "80,20,0"}
    plain, weighted = (
        load_splits(experiment(**given, **{"data.data_path": value}), workspace)["train"]
        for value in ("data/a", (3.0, "data/a"))
    )
    assert all((plain[number] == weighted[number]).all() for number in (0, 1, 999))


def test_a_run_says_what_it_reads(workspace: Path) -> None:
    samples = blend(workspace, (0.75, "data/a", 0.25, "data/b"))
    assert samples.description == f"a blend of 2 data sets, {samples.per_epoch} samples of 8"
    assert samples.per_epoch == int(samples.parts[0].per_epoch / 0.75)
    assert list(samples.epochs(400)) == [
        f" 75.00% data/a: 1,312 training tokens, 163 samples of 8 an epoch, {300 / 163:.2f} epochs",
        f" 25.00% data/b: 656 training tokens, 81 samples of 8 an epoch, {100 / 81:.2f} epochs",
    ]


def test_parts_with_data_of_their_own(workspace: Path) -> None:
    own = {"data.data_path": None, "data.split": "949,50,1", "data.train_data_path": "data/a"}
    given = {"model.vocab_size": VOCABULARY, "train.eval_interval": 5, **own}
    valid = {"data.valid_data_path": (0.5, "data/b", 0.5, "data/c")}
    splits = load_splits(experiment(**given, **valid), workspace)
    assert splits["train"].per_epoch == 40 * 41 // 8 - (40 * 41 % 8 == 0)
    assert {source(splits["train"][number]) for number in range(300)} == {"a"}
    assert Counter(source(splits["valid"][number]) for number in range(300)) == {"b": 150, "c": 150}
    assert splits["test"].per_epoch == 0


@pytest.mark.parametrize("sets", [("data/a", "data/b"), ("data/c", "data/a", "data/b")], ids=["all", "first-unknown"])
def test_a_tokenizer_of_its_own_is_refused(workspace: Path, sets: tuple[str, ...]) -> None:
    """Data set c has no manifest, as Megatron's own."""
    for name, tokens in (("a", 40 * 41), ("b", 20 * 41)):
        manifest = DatasetManifest(
            vocab_size=VOCABULARY, documents=1, tokens=tokens, tokenizer_sha256=name * 64, end_of_document=None,
            inputs=(),
        )  # fmt: skip
        write_manifest(workspace / f"data/{name}", manifest)
    with pytest.raises(RequestError) as caught:
        blend(workspace, sets)
    assert str(caught.value) == (
        f"data/b.json: was made with another tokenizer than data/a, which has tokenizer_sha256 {'a' * 64}; "
        f"got {'b' * 64}; make all data sets of a run with one tokenizer"
    )


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.9, 0.1], [0.05, 0.05, 0.9], [1.0]])
def test_the_order_is_fair_and_each_number_comes_in_turn(shares: list[float]) -> None:
    parts, numbers = blending_order(shares, 1000)
    for part, share in enumerate(shares):
        own = numbers[parts == part]
        assert abs(len(own) - share * 1000) <= 1
        assert (own == np.arange(len(own))).all()
