"""Our indexed data sets beside megatron-core's own reader and writer."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.data.test_indexed_dataset import DOCUMENTS, write
from tridock.data.indexed_dataset import IndexedDataset

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
