"""Our indexed data sets beside megatron-core's own reader and writer."""

import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.test_indexed_dataset import DOCUMENTS, write
from tridock.data.dataset.indexed_dataset import IndexedDataset, bin_path, idx_path, write_index
from tridock.data.dataset.inspect import inspect
from tridock.data.dataset.merge import merge
from tridock.data.dataset.split import by_shares, split
from tridock.data.dataset.verify import verify
from tridock.errors import RequestError
from tridock.train.data.blend import blending_order

pytestmark = pytest.mark.distributed


@given(DOCUMENTS)
@settings(max_examples=20)
def test_megatron_writes_and_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("megatron")
    builder = theirs.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document, np.uint16), [len(document)] if document else [])
    builder.finalize(str(folder / "theirs.idx"))
    write(folder / "ours", documents)
    for suffix in ("bin", "idx"):
        assert (folder / f"ours.{suffix}").read_bytes() == (folder / f"theirs.{suffix}").read_bytes()
    if any(documents):  # theirs cannot map an empty file
        read = theirs.IndexedDataset(str(folder / "ours"))
        assert [read[number].tolist() for number in range(len(read))] == [d for d in documents if d]
        assert read.document_indices.tolist() == IndexedDataset(folder / "theirs").document_index.tolist()


@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.booleans())
@settings(max_examples=6)  # theirs collects garbage after each index, which takes a while with torch in memory
def test_megatron_merges_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, sets: list[list[list[int]]], wide: bool
) -> None:
    """Its tools/merge_datasets.py adds the index of each prefix of a folder, by name."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("merged")
    prefixes = [write(folder / f"p{n}", documents, None if wide else 1000) for n, documents in enumerate(sets)]
    builder = theirs.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=np.int32 if wide else np.uint16)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(str(folder / "theirs.idx"))
    merge(prefixes, folder / "ours")
    for suffix in ("bin", "idx"):
        assert (folder / f"ours.{suffix}").read_bytes() == (folder / f"theirs.{suffix}").read_bytes()


@given(st.integers(1, 3000), st.lists(st.integers(1, 999), min_size=1, max_size=3))
@settings(max_examples=200)
def test_megatron_splits_at_the_same_documents(documents: int, shares: list[int]) -> None:
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config", exc_type=ImportError)
    text = ",".join(map(str, shares))
    # As its BlendedMegatronDatasetBuilder does it for the ends of each split.
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(text))
    theirs = [(round(pair[0] * float(documents)), round(pair[1] * float(documents))) for pair in matrix if pair]
    try:
        ours = [(first, last) for _, first, last in by_shares(text, documents)]
    except RequestError:  # a share without a document, which Megatron lets be
        assert any(first == last for first, last in theirs)
        return
    assert ours == theirs


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.integers(1, 3000))
@settings(max_examples=100)
def test_megatron_blends_in_the_same_order(weights: list[float], size: int) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", exc_type=ImportError)
    shares = [weight / sum(weights) for weight in weights]
    sets, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(sets, numbers, np.array(shares), len(shares), size, False)
    assert (blending_order(shares, size) == np.stack([sets, numbers])).all()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """More than 2**31 tokens in more than 2**32 bytes, nearly all of them holes: 4 sequences in 3 documents."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**34
    folder = Path(tempfile.mkdtemp(dir=memory)) if roomy else tmp_path_factory.mktemp("large")
    prefix = folder / "d"
    lengths = np.array([2**31 - 1, 5, 2**20, 7], np.int32)
    write_index(idx_path(prefix), np.dtype(np.uint16), lengths, np.array([0, 2, 3, 4], np.int64))
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
        for sequence, token in ((0, 11), (1, 12), (3, 14)):
            file.seek(2 * int(lengths[:sequence].sum(dtype=np.int64)))
            file.write(np.array([token], np.uint16).tobytes())
    assert bin_path(prefix).stat().st_size > 2**32
    yield prefix
    shutil.rmtree(folder)


def test_large_data_is_told_and_verified(large: Path) -> None:
    found = inspect(large, 3, None)
    assert (found.tokens, found.documents.max, found.sequences.max) == (2**31 + 2**20 + 11, 2**31 + 4, 2**31 - 1)
    assert [sample.tokens for sample in found.samples] == [2**31 + 4, 2**20, 7]
    assert [sample.ids[0] for sample in found.samples] == [11, 0, 14]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found_wrong = verify(large, 12)
    assert found_wrong.facts == "3 documents, 4 sequences, 2,148,532,235 tokens of uint16"
    assert [str(problem).partition(":")[0] for problem in found_wrong.problems] == [
        f"{large}.bin, document 0, sequence 1, byte 4294967294",
        f"{large}.bin, document 2, sequence 3, byte 4297064456",
    ]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # kB


def test_large_data_is_split_merged_and_read_by_megatron(large: Path) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    parts = split(large, None, 2, large.with_name("part"))
    assert [part.tokens for part in parts] == [2**31 + 4, 2**20 + 7]
    merge([part.prefix for part in parts], large.with_name("again"))
    again = large.with_name("again")
    assert idx_path(again).read_bytes() == idx_path(large).read_bytes()
    read = theirs.IndexedDataset(str(again))
    assert read.index.sequence_pointers.dtype == np.int64
    assert read.index.sequence_pointers.tolist() == [0, 2**32 - 2, 2**32 + 8, 2**32 + 8 + 2**21]
    assert read.document_indices.tolist() == [0, 2, 3, 4]
    assert [read[1].tolist(), read[3].tolist()] == [[12, 0, 0, 0, 0], [14, 0, 0, 0, 0, 0, 0]]
    assert [int(read.get(number, length=1)[0]) for number in range(4)] == [11, 12, 0, 14]
    dataset = IndexedDataset(again)
    assert [int(dataset[number][0]) for number in range(4)] == [11, 12, 0, 14]
