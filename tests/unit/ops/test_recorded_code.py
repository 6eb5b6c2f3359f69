"""The code that a run has recorded: what is read of it again, from a folder that hosts may have written."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.ops.runs import code
from tridock.ops.runs.code import code_of_run, read_code


def a_program(run: Path, index: dict[str, bytes], **code: str) -> Path:
    """A run's folder whose index has these contents by their names."""
    files = {name: {"sha256": sha256(content).hexdigest(), "executable": False} for name, content in index.items()}
    (run / "code").mkdir(parents=True)
    (run / "code.json").write_text(json.dumps(files))
    (run / "manifest.json").write_text(json.dumps({"code": {"files": len(files)}}))
    for name, text in code.items():
        (run / "code" / name).write_text(text)
    return run


@pytest.mark.parametrize("name", ["{secret}", "../../secret", "a/../../../secret"])
def test_a_runs_index_names_no_file_of_yours(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("mine")
    run = a_program(tmp_path / "run", {name.format(secret=tmp_path / "secret"): b"mine"})
    with pytest.raises(RequestError, match=r"code\.json: cannot be read; got '.*' is no name below a folder; fetch"):
        code_of_run(run)


def test_a_link_in_a_runs_code_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    run = a_program(tmp_path / "run", {"a": b"mine", "b/secret": b"mine2"})
    (run / "code" / "a").symlink_to(tmp_path / "secret")
    (run / "code" / "b").symlink_to(tmp_path)
    found = code_of_run(run)
    assert b"mine" not in b"".join(code.archive_of(found, [sha256(b"mine").hexdigest()]))
    with pytest.raises(RequestError, match=r"code/b: is a link or a file where a folder belongs"):
        list(code.archive_of(found, [sha256(b"mine2").hexdigest()]))


@pytest.mark.parametrize("name", ["code.json", "code.diff"])
def test_a_link_in_the_place_of_a_runs_own_file_is_not_followed(tmp_path: Path, name: str) -> None:
    run = a_program(tmp_path / "run", {"a": b"1"}, a="1")
    (tmp_path / "mine").write_text((run / "code.json").read_text())
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "mine")
    with pytest.raises(RequestError, match=r"code\.json: cannot be read; got .*Too many levels of symbolic links"):
        code_of_run(run)


def test_a_run_remembers_the_code_with_which_it_began(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("as it was")
    first = read_code(tmp_path / "code")
    (tmp_path / "code.json").write_text(first.index)
    (tmp_path / "code.diff").write_text("+1\n")
    (tmp_path / "manifest.json").write_text(json.dumps({"code": dict(first.origin)}))
    (tmp_path / "code" / "train.py").write_text("what the program made of it")
    (tmp_path / "code" / "model.pt").write_text("a result")
    again = code_of_run(tmp_path)
    assert (again.files, again.origin, again.diff) == (first.files, first.origin, b"+1\n")


def test_a_run_that_does_not_know_its_code(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fetch the run's folder whole"):
        code_of_run(tmp_path)


def test_a_program_of_the_image_may_have_no_code(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    none = read_code(tmp_path / "empty")
    (tmp_path / "manifest.json").write_text(json.dumps({"code": dict(none.origin)}))
    (tmp_path / "code.json").write_text(none.index)
    assert code_of_run(tmp_path).files == {}
    (tmp_path / "code.json").unlink()
    (tmp_path / "manifest.json").write_text(json.dumps({"code": {"files": 2}}))
    with pytest.raises(RequestError, match="fetch the run's folder whole"):
        code_of_run(tmp_path)
