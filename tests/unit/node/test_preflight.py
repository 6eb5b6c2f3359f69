"""What a node says of the files that a run would read."""

import errno
import hashlib
import itertools
import json
import os
import resource
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataset_writer import IndexedDatasetWriter
from tests.unit.node.conftest import answer
from tridock.contracts.data_index import Part, parts_of, split_bounds
from tridock.data.dataset.indexed_dataset import IndexedDataset
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
        "load_progress": None,
        "weights": None,
        "has_tokenizer": True,
        "tokenizers_of_weights": None,
        "tokenizer_of_files": None,
        "missing_packages": [],
        "lacks": [],
        "multicast": None,
        "memlock": limits_and_space.soft_limit(resource.RLIMIT_MEMLOCK),
        "nvme": {},
        "save_problem": "",
        "parts": {},
        "images": None,
        "damage": None,
        "rendezvous": None,
        "image_manifest": None,
        "contract": None,
    }


def test_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    assert answer("preflight", f"--load={tmp_path}")["loads"] is True
    assert answer("preflight", f"--load={tmp_path}/none")["loads"] is False


def test_what_a_run_needs_besides_packages(tmp_path: Path) -> None:
    def lacks(*given: str) -> list[str]:
        return [f"{it['where']}: {it['what']}; {it['got']}" for it in answer("preflight", *given)["lacks"]]

    source = f"--rank-env=TRIDOCK_MEGATRON={tmp_path}"
    assert lacks("--needs=megatron-source", source) == [f"engine: Megatron-LM v1.1.5 is not installed; {tmp_path}"]
    (tmp_path / "pretrain_gpt2.py").touch()
    assert lacks("--needs=megatron-source", source) == []
    missing = lacks("--needs=compiler", "--rank-env=DS_ACCELERATOR=cpu", "--rank-env=CXX=no-such-compiler")
    assert missing[0].endswith("no no-such-compiler on the PATH")


def test_the_progress_of_the_checkpoint_to_continue(tmp_path: Path) -> None:
    for iteration in (2, 10):
        (tmp_path / f"iter_{iteration:07}").mkdir()
        (tmp_path / f"iter_{iteration:07}" / "tridock.json").write_text(json.dumps({"iteration": iteration}))
    (tmp_path / "iter_0000002" / "files.json").write_text("{}")

    def progress(folder: Path) -> object:
        return answer("preflight", f"--progress-of={folder}")["load_progress"]

    assert progress(tmp_path) == {"iteration": 2}  # the other one is not complete
    assert progress(tmp_path / "iter_0000010") == {"iteration": 10}
    assert progress(tmp_path / "none") is None


def test_the_tokenizer_of_weights_and_of_files(tmp_path: Path) -> None:
    """Without the library of tokenizers; the hashes are compared with its own in tests/unit/data."""
    found = tmp_path / "model"
    found.mkdir()

    def of(load: str) -> list[str] | None:
        known: list[str] | None = answer("preflight", f"--tokenizer-of={load}")["tokenizers_of_weights"]
        return known

    assert of(f"hf:{found}") == of(f"megatron:{found}") == of(f"deepspeed:{found}") == []
    vocab, merges = found / "vocab.json", found / "merges.txt"
    vocab.write_text('{"a": 0, "b": 1, "ab": 2}')
    merges.write_text("#version: 0.2\na b\n")
    files = [f"--gpt2-file={path}" for path in (vocab, merges)]
    own = answer("preflight", *files)["tokenizer_of_files"]
    assert of(f"hf:{found}") == of(f"deepspeed:{found}") == [own]
    description = {
        "version": "1.0", "added_tokens": [{"id": 2, "content": "ab", "special": True, "normalized": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {"type": "BPE", "dropout": None, "vocab": {"b": 1, "a": 0, "ab": 2}, "merges": ["a b"]},
    }  # fmt: skip
    (found / "tokenizer.json").write_text(json.dumps(description))
    assert of(f"hf:{found}") == [own]
    (found / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    tokens, without = of(f"hf:{found}") or ()
    assert (tokens != own, without) == (True, own)
    (found / "tokenizer.model").write_bytes(b"pieces")
    assert of(f"hf:{found}") == [tokens, own, hashlib.sha256(b"pieces").hexdigest()]
    (found / "tokenizer.json").write_text('{"model": {"vocab": [[1]]}}')
    assert of(f"hf:{found}") == [hashlib.sha256(b"pieces").hexdigest()]
    merges.write_bytes(b"\xff")
    assert answer("preflight", *files)["tokenizer_of_files"] is None


def test_the_tokenizer_that_a_checkpoint_was_trained_with(tmp_path: Path) -> None:
    def of(load: Path) -> list[str] | None:
        known: list[str] | None = answer("preflight", f"--tokenizer-of={load}")["tokenizers_of_weights"]
        return known

    run, one = tmp_path / "checkpoints", tmp_path / "checkpoints" / "iter_0000003"
    assert of(run) is None
    one.mkdir(parents=True)
    assert of(run) is None
    (one / "files.json").touch()
    (one / "tridock.json").write_text('{"tokenizer_sha256": null}')
    assert of(run) == of(one) == []
    (one / "tridock.json").write_text('{"tokenizer_sha256": "aa"}')
    assert of(run) == of(one) == ["aa"]
    (one / "tridock.json").unlink()
    (one / "layout.json").write_text('{"tokenizer_sha256": "bb"}')
    assert of(run) == of(one) == ["bb"]


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


def test_nodes_that_share_a_folder_read_the_same_identity(tmp_path: Path) -> None:
    ours, theirs, link = tmp_path / "ours/runs", tmp_path / "theirs/runs", tmp_path / "mounted"
    link.symlink_to(ours.parent)
    first = limits_and_space.folder_identity(ours)
    assert len(first) == 32
    assert [limits_and_space.folder_identity(it) for it in (ours, link / "runs")] == [first, first]
    assert limits_and_space.folder_identity(theirs) not in ("", first)
    assert [path.name for path in ours.iterdir()] == [".folder-id"]


def test_nodes_that_ask_at_once_agree_on_the_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: limits_and_space.folder_identity(tmp_path), range(200)))
    assert len(found) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".folder-id"]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert len({limits_and_space.folder_identity(tmp_path) for _ in range(3)}) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".folder-id"]


def test_whether_ranks_can_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert answer("preflight", f"--save={tmp_path}/runs/more")["save_problem"] == ""
    assert answer("preflight", f"--save={tmp_path}/file/runs")["save_problem"] == f"{tmp_path}/file is no folder"
    assert [it.name for it in tmp_path.iterdir()] == ["file"]  # nothing is made
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert limits_and_space.write_problem(tmp_path / "runs") == f"no permission to write in {tmp_path}"
    assert limits_and_space.folder_identity(tmp_path / "file") == ""


@given(
    lengths=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8),
    shares=st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
    vocabulary=st.sampled_from([100, 70_000]),
)
def test_the_parts_of_the_data_are_those_of_the_ranks(
    lengths: list[list[int]], shares: tuple[int, int, int], vocabulary: int
) -> None:
    split = ",".join(map(str, shares))
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x.y"
        with IndexedDatasetWriter(prefix, vocabulary) as writer:
            for document in lengths:
                writer.add_document([1] * sum(document))
        found = parts_of(prefix, split)
        dataset = IndexedDataset(prefix)
        bounds = split_bounds(dataset.documents, split)
        expected = []
        for number in range(3):
            first, last = dataset.token_bounds(bounds[number], bounds[number + 1])
            expected.append(Part(bounds[number + 1] - bounds[number], last - first))
    assert found == tuple(expected)


@given(
    lengths=st.lists(st.integers(0, 5), max_size=40),
    shares=st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_the_parts_of_megatron_v115(lengths: list[int], shares: tuple[int, int, int]) -> None:
    """It rounds each share by itself, and takes what is too much from the first."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x"
        with IndexedDatasetWriter(prefix, 100) as writer:
            for length in lengths:
                writer.add_document([1] * length)
        sizes = IndexedDataset(prefix).lengths.tolist()
        found = parts_of(prefix, ",".join(map(str, shares)), v115=True)
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + round(share / sum(shares) * float(len(sizes))))
    ends = [0, *(end - (ends[-1] - len(sizes)) for end in ends[1:])]
    if min(ends) < 0:
        return  # upstream fails as well
    assert found == tuple(Part(b - a, sum(sizes[a:b])) for a, b in itertools.pairwise(ends))


def test_data_that_is_damaged_or_not_there(tmp_path: Path) -> None:
    prefix = tmp_path / "x"
    assert answer("preflight", f"--data={prefix}")["parts"] == {}
    with IndexedDatasetWriter(prefix, 100) as writer:
        writer.add_document([1, 2, 3])
    assert answer("preflight", f"--data={prefix}")["parts"][str(prefix)][0] == {"documents": 1, "tokens": 3}
    (tmp_path / "x.bin").write_bytes(b"12345")
    found = answer("preflight", f"--data={prefix}")
    assert found["parts"] == {}
    assert found["damage"]["what"] == "does not fit its index, which describes 6 bytes"
    (tmp_path / "x.idx").write_bytes(b"other")
    assert answer("preflight", f"--data={prefix}")["damage"]["what"] == "is not an index of Megatron"
