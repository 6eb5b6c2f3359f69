"""What a node says of the files that a run would read."""

import hashlib
from pathlib import Path

from tests.unit.node.conftest import answer


def test_files_are_told_apart_by_size_and_content(tmp_path: Path) -> None:
    tokens, index, missing = tmp_path / "text.bin", tmp_path / "text.idx", tmp_path / "none"
    tokens.write_bytes(b"12345")
    index.write_bytes(b"lengths")
    assert answer("preflight", str(tokens), str(index), str(missing), str(tmp_path)) == {
        "files": {
            str(tokens): {"bytes": 5, "sha256": None},
            str(index): {"bytes": 7, "sha256": hashlib.sha256(b"lengths").hexdigest()},
            str(missing): None,
            str(tmp_path): None,
        }
    }


def test_outside_of_an_image_there_is_no_manifest() -> None:
    assert answer("preflight", "--head")["image_manifest"] is None
