"""What a node says of the files that a run would read."""

import errno
import hashlib
import os
import resource
from pathlib import Path

import pytest

from tests.unit.node.conftest import answer
from tridock.node.probes import limits_and_space, preflight


def test_files_are_told_apart_by_size_and_content(tmp_path: Path) -> None:
    tokens, index, missing = tmp_path / "text.bin", tmp_path / "text.idx", tmp_path / "none"
    tokens.write_bytes(b"12345")
    index.write_bytes(b"lengths")
    found = answer("preflight", str(tokens), str(index), str(missing), str(tmp_path))
    assert 1 << 28 < found.pop("memory") <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found == {
        "files": {
            str(tokens): {"bytes": 5, "sha256": None, "entries": None},
            str(index): {"bytes": 7, "sha256": hashlib.sha256(b"lengths").hexdigest(), "entries": None},
            str(missing): None,
            str(tmp_path): None,
        },
        "read": {},
        "loads": True,
        "load_lacks": None,
        "load_inside": None,
        "load_format": None,
        "weights": None,
        "has_tokenizer": True,
        "missing_packages": [],
        "multicast": None,
        "memlock": limits_and_space.soft_limit(resource.RLIMIT_MEMLOCK),
        "nvme": {},
        "rendezvous": None,
        "image_manifest": None,
        "contract": None,
    }


def test_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    assert answer("preflight", f"--load={tmp_path}")["loads"] is True
    assert answer("preflight", f"--load={tmp_path}/none")["loads"] is False


def test_a_folder_that_holds_no_checkpoint(tmp_path: Path) -> None:
    def said(folder: Path) -> tuple[str | None, str | None]:
        found = answer("preflight", f"--load={folder}")
        return found["load_lacks"], found["load_inside"]

    pointers = "neither latest_checkpointed_iteration.txt nor latest nor folders iter_… or global_step…"
    run = tmp_path / "run"
    own = run / "checkpoints"
    one = own / "iter_0000003"
    own.mkdir(parents=True)
    assert said(own) == ("empty", None)
    assert said(run) == (pointers, None)
    one.mkdir()
    assert said(own) == (pointers, None)  # the ranks would look into a folder that is empty
    assert said(one) == ("empty", None)
    (one / "files.json").touch()
    assert said(own) == said(one) == (None, None)
    assert said(run) == (pointers, str(own))
    (run / "latest").write_text("global_step7")
    assert said(run) == (None, None)
    (tmp_path / "release").mkdir()
    assert said(tmp_path / "release") == ("empty", None)
    for place in ("plain/mp_rank_00/model_optim_rng.pt", "zero/x/mp_rank_00_model_states.pt"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
        assert said(tmp_path / place.partition("/")[0]) == (None, None)
    assert said(tmp_path / "none") == (None, None)  # "loads" says it
    assert answer("preflight", f"--load={tmp_path}", f"--weights=hf:{tmp_path}")["load_lacks"] is None


def test_a_vocabulary_is_counted_and_a_json_file_is_shown_where_it_can_be_read(tmp_path: Path) -> None:
    vocabulary, broken = tmp_path / "vocab.json", tmp_path / "broken.json"
    vocabulary.write_text('{"a": 0, "b": 1}')
    broken.write_text("{")
    answer_ = answer(
        "preflight", "--read", str(vocabulary), "--read", str(tmp_path / "none"), str(vocabulary), str(broken)
    )
    assert answer_["files"][str(vocabulary)]["entries"] == 2
    assert answer_["files"][str(broken)]["entries"] is None
    assert answer_["read"] == {str(vocabulary): {"a": 0, "b": 1}, str(tmp_path / "none"): None}


def test_outside_of_an_image_there_is_no_manifest() -> None:
    assert answer("preflight", "--head")["image_manifest"] is None


def test_a_tokenizer_may_be_in_one_of_several_folders(tmp_path: Path) -> None:
    places = [f"--tokenizer={tmp_path / name}" for name in ("a.json", "b.json")]
    assert answer("preflight", *places)["has_tokenizer"] is False
    (tmp_path / "b.json").touch()
    assert answer("preflight", *places)["has_tokenizer"] is True


def test_a_node_without_a_gpu_has_no_multicast() -> None:
    assert answer("preflight", "--multicast")["multicast"] is False


def test_packages_that_it_does_not_have() -> None:
    names = ["json", "json.tool", "no_such_package", "json.none", "none.of.them"]
    found = answer("preflight", *(f"--package={name}" for name in names))["missing_packages"]
    assert found == ["no_such_package", "json.none", "none.of.them"]


def test_folders_on_nvme(tmp_path: Path) -> None:
    """Root may write anywhere: a file in the place of a folder stands for one without permission."""
    file = tmp_path / "file"
    file.touch()
    found = answer("preflight", f"--nvme={tmp_path}", f"--nvme={tmp_path}/none", f"--nvme={file}")["nvme"]
    usable = found[str(tmp_path)]
    assert (usable["problem"], usable["device"]) == (None, tmp_path.stat().st_dev)
    assert usable["free"] > 1 << 20
    assert found[f"{tmp_path}/none"]["problem"] == "no such file or directory"
    assert found[str(file)]["problem"] == "not a directory"
    assert [*tmp_path.iterdir()] == [file]


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tmpfs was until Linux 6.6."""
    opened = os.open

    def refuse(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    assert preflight._nvme_folder(tmp_path).problem == "its file system has no direct I/O"


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    host.write_text("MemTotal:        1024 kB\nMemFree:          512 kB\n")
    monkeypatch.setattr(limits_and_space, "_MEMORY", host)
    monkeypatch.setattr(limits_and_space, "_MEMORY_LIMITS", (tmp_path / "none", limit))
    for text, expected in (("max\n", 1 << 20), ("4096\n", 4096), ("9223372036854771712\n", 1 << 20)):
        limit.write_text(text)
        assert limits_and_space.memory() == expected
    host.unlink()
    limit.unlink()
    assert limits_and_space.memory() is None


def test_a_folder_of_weights(tmp_path: Path) -> None:
    """What is in it: tests/unit/train/test_pretrained.py, which has torch to write it."""
    assert answer("preflight", f"--weights=deepspeed:{tmp_path}/none")["weights"] is None
    problem = answer("preflight", f"--weights=deepspeed:{tmp_path}")["weights"]["problem"]
    assert (problem["where"], problem["what"]) == (str(tmp_path), "holds no checkpoint of DeepSpeed")


def test_the_format_of_a_folder_to_resume_from(tmp_path: Path) -> None:
    assert answer("preflight", f"--load={tmp_path}")["load_format"] is None
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert answer("preflight", f"--load={tmp_path}")["load_format"] == "hf"
    assert answer("preflight", f"--load={tmp_path}", f"--weights=hf:{tmp_path}")["load_format"] is None
    (tmp_path / "tridock.json").touch()
    assert answer("preflight", f"--load={tmp_path}")["load_format"] is None
