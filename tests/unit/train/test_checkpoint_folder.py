"""One rank saves and chooses checkpoints; judging whether one fits, before anything is loaded."""

import errno
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.train.experiments import experiment
from tridock.contracts.checkpoints import COPIED, newest, write_copied
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError
from tridock.train.checkpoints.checkpoint import Checkpoints, check_shared
from tridock.train.checkpoints.choice import choose as chosen
from tridock.train.checkpoints.files import MEGATRON, TORCH, Names, is_complete
from tridock.train.checkpoints.progress import Progress, check_fit, read_progress
from tridock.train.checkpoints.snapshot import Write
from tridock.train.rank.process_group import AgreedError, Ranks, join, leave

RANKS = Ranks(0, 0, 2, torch.device("cpu"))
ZERO = {"parallel.strategy": "zero", "parallel.zero_stage": 2}


def progress(**fields: object) -> Progress:
    return Progress.of(experiment(**fields), RANKS, 100, padded_vocab_size=128)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"a": 1}', "Progress.__init__() got an unexpected keyword argument 'a'"),
    ],
)
def test_half_a_checkpoint(tmp_path: Path, content: str | None, got: str) -> None:
    if content is not None:
        (tmp_path / "tridock.json").write_text(content)
    with pytest.raises(RequestError) as caught:
        read_progress(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/tridock.json: cannot be read; got {got}; use another checkpoint: this one is incomplete"
    )


def test_every_difference_is_named(tmp_path: Path) -> None:
    saved = replace(progress(**ZERO), data_parallel_size=4)  # which may be another
    wanted = progress(**{"model.hidden_size": 32, "model.seq_length": 64, **ZERO, "parallel.zero_stage": 1})
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, replace(wanted, precision="fp32"))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start from scratch"
    assert str(caught.value).splitlines() == [
        f"model.hidden_size: {where} 16; got 32; {todo}",
        f"model.max_position_embeddings: {where} 8; got 64; {todo}",
        f"parallel.zero_stage: {where} 2; got 1; {todo}",
        f"precision: {where} bf16; got fp32; {todo}",
    ]


def test_heads_have_the_size_of_the_checkpoints(tmp_path: Path) -> None:
    plain, same, other = (
        progress(**ZERO, **{"model.num_attention_heads": 2, "model.kv_channels": size}) for size in (None, 8, 12)
    )
    check_fit(tmp_path, plain, same)
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, plain, other)
    assert str(caught.value).startswith("model.kv_channels: ")


def test_a_mixture_has_the_experts_of_the_checkpoint(tmp_path: Path) -> None:
    core = {"engine": "megatron-core", "parallel.strategy": "ddp", "model.add_bias_linear": False}
    four = {**core, "model.num_moe_experts": 4, "model.moe_ffn_hidden_size": 24}
    gated = {"model.moe_shared_expert_intermediate_size": 8, "model.moe_shared_expert_gate": True}
    check_fit(tmp_path, progress(**four), progress(**four))
    check_fit(tmp_path, progress(**core), progress(**core))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start from scratch"
    for saved, wanted, named in (
        (four, {**four, "model.num_moe_experts": 8}, {"num_moe_experts": "4; got 8"}),
        (four, core, {"num_moe_experts": "4; got None"}),
        (core, {**core, "model.num_moe_experts": 4}, {"num_moe_experts": "None; got 4"}),
        (four, {**four, "model.moe_ffn_hidden_size": 16}, {"moe_ffn_hidden_size": "24; got 16"}),
        (four, {**four, "model.moe_router_topk": 3}, {"moe_router_topk": "2; got 3"}),
        ({**four, **gated}, four, {"moe_shared_expert_intermediate_size": "8; got None",
                                   "moe_shared_expert_gate": "True; got False"}),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            check_fit(tmp_path, progress(**saved), progress(**wanted))
        found = str(caught.value).splitlines()
        for name, values in named.items():
            assert f"model.{name}: {where} {values}; {todo}" in found


def test_ddp_may_change_what_does_not_matter_to_it(tmp_path: Path) -> None:
    ddp = {"parallel.strategy": "ddp"}
    saved = replace(progress(**ddp, precision="fp32"), data_parallel_size=8)
    check_fit(tmp_path, saved, progress(**ddp))
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, progress(**ZERO))
    assert str(caught.value).startswith(f"parallel.strategy: the checkpoint {tmp_path} was saved with ddp; got zero; ")


def test_megatron_core_may_change_its_layout_and_not_its_optimizer(tmp_path: Path) -> None:
    core = {"engine": "megatron-core", "precision": "fp16"}
    saved = replace(progress(**core), data_parallel_size=8)
    check_fit(tmp_path, saved, progress(**core, **{"parallel.tensor_model_parallel_size": 2}))
    wanted = progress(**core, **{"parallel.use_distributed_optimizer": True})
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, replace(wanted, precision="bf16"))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start from scratch"
    assert str(caught.value).splitlines() == [
        f"precision: {where} fp16; got bf16; {todo}",
        f"parallel.use_distributed_optimizer: {where} False; got True; {todo}",
    ]


def test_a_checkpoint_of_another_engine(tmp_path: Path) -> None:
    saved = progress(**{"parallel.strategy": "ddp"}, precision="fp32")
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, progress(engine="megatron-core", precision="fp32"))
    assert str(caught.value) == (
        f"engine: the checkpoint {tmp_path} was saved with torch; got megatron-core;"
        " use the same, or start from scratch"
    )


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    check_shared(tmp_path, 0)
    with pytest.raises(RequestError) as caught:
        check_shared(tmp_path, 4)
    assert str(caught.value) == (
        "train.save: checkpoints of this engine lie in one folder that all nodes share; "
        f"got a folder of rank 4's node alone: {tmp_path}; mount a shared file system there, or set it to false"
    )


TODO = "restore it, or continue from another checkpoint"
Reasons = dict[str, list[str]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A world of this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield join()
    leave()


def save(checkpoints: Checkpoints, iteration: int, keep: int | None = None) -> Path:
    def prepare(folder: Path, writes_shared: bool, background: object) -> Write:
        assert (writes_shared, background) == (True, None)
        return lambda: write_atomic(folder / "model.pt", bytes([iteration]) * 100)

    return checkpoints.start(prepare, iteration, {"tridock.json": b"{}"}, ["model.pt", "tridock.json"], keep)()


def choose(checkpoints: Checkpoints, source: Path) -> tuple[str, Reasons]:
    passed_over: Reasons = {}

    def note(folder: Path, problems: Sequence[Problem]) -> None:
        passed_over[folder.name] = [str(problem) for problem in problems]

    return chosen(source, checkpoints.names, checkpoints.ranks, lambda _: ["model.pt"], note).name, passed_over


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("names", "pointer", "word"), [
    (TORCH, "latest", "iter_0000009"), (MEGATRON, "latest_checkpointed_iteration.txt", "9"),
])  # fmt: skip
def test_the_latest_or_a_named_one(tmp_path: Path, ranks: Ranks, names: Names, pointer: str, word: str) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, names)
    first = save(checkpoints, 5)
    assert save(checkpoints, 9) == tmp_path / "iter_0000009"
    assert listing(tmp_path) == ["iter_0000005", "iter_0000009", pointer]
    assert listing(first) == ["files.json", "model.pt", "tridock.json"]
    assert (tmp_path / pointer).read_text() == word
    assert choose(checkpoints, tmp_path) == ("iter_0000009", {})
    assert choose(checkpoints, first) == ("iter_0000005", {})
    # A pointer that lags behind hides nothing.
    (tmp_path / pointer).write_text(word.replace("9", "5") + "\n")
    todo = f"to continue from the older one, set train.load to {first}"
    lags = f"{tmp_path / pointer}: names an older checkpoint than iter_0000009; got iter_0000005; {todo}"
    assert choose(checkpoints, tmp_path) == ("iter_0000009", {pointer: [lags]})


@pytest.mark.parametrize("spoiled", [b"\0garbage", b"\xff\xfe", b"", None])
def test_the_newest_is_found_whatever_the_pointer_holds(tmp_path: Path, ranks: Ranks, spoiled: bytes | None) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (5, 9):
        save(checkpoints, iteration)
    (tmp_path / "latest").unlink()
    if spoiled is not None:
        (tmp_path / "latest").write_bytes(spoiled)
    assert choose(checkpoints, tmp_path)[0] == "iter_0000009"
    assert newest(tmp_path) == (9, tmp_path / "iter_0000009")
    assert newest(tmp_path, since=time.time() + 60) is None


def test_checkpoints_of_another_history_are_set_aside(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    folders = [save(checkpoints, iteration) for iteration in (2, 4, 6)]
    assert checkpoints.set_aside_after(6, folders[2]) == []
    aside = ["iter_0000004.set-aside-1", "iter_0000006.set-aside-1"]
    assert checkpoints.set_aside_after(2, folders[0]) == aside
    assert (tmp_path / "latest").read_text() == "iter_0000002"
    assert is_complete(tmp_path / aside[1])
    save(checkpoints, 4)
    elsewhere = tmp_path / "other" / "iter_0000004"
    assert checkpoints.set_aside_after(4, elsewhere) == ["iter_0000004.set-aside-2"]
    assert listing(tmp_path) == ["iter_0000002", aside[0], "iter_0000004.set-aside-2", aside[1]]
    assert newest(tmp_path) == (2, tmp_path / "iter_0000002")


def test_what_is_not_whole_is_passed_over(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (1, 2, 3, 4):
        save(checkpoints, iteration)
    (tmp_path / "iter_0000004/model.pt").write_bytes(b"")
    (tmp_path / "iter_0000003/files.json").unlink()
    (tmp_path / "iter_0000002").rename(tmp_path / "gone")
    (tmp_path / "latest").write_text("")
    got = "got ''; the newest complete one is used"
    assert choose(checkpoints, tmp_path) == (
        "iter_0000001",
        {
            "latest": [f"{tmp_path}/latest: names no checkpoint; {got}"],
            "iter_0000004": [f"{tmp_path}/iter_0000004/model.pt: is cut short; got 0 bytes instead of 100; {TODO}"],
            "iter_0000003": [
                f"{tmp_path}/iter_0000003/files.json: is missing: the save did not come to its end; {TODO}"
            ],
        },
    )


def test_the_pointers_checkpoint_is_missed(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    save(checkpoints, 1)
    shutil.rmtree(save(checkpoints, 2))
    name, passed_over = choose(checkpoints, tmp_path)
    assert (name, passed_over) == ("iter_0000001", {"iter_0000002": [f"{tmp_path}/iter_0000002: is missing; {TODO}"]})


def test_none_is_whole(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (1, 2):
        (save(checkpoints, iteration) / "model.pt").unlink()
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    for source, names in ((tmp_path, ("iter_0000002", "iter_0000001")), (tmp_path / "iter_0000001", ("iter_0000001",))):
        with pytest.raises(AgreedError) as caught:
            choose(checkpoints, source)
        assert caught.value.error.exit_code == 2
        parent = source if source == tmp_path else source.parent
        assert str(caught.value).splitlines() == [
            f"train.load: no complete checkpoint is in {source}; {todo}",
            *(f"{parent}/{name}/model.pt: is missing; {TODO}" for name in names),
        ]


def test_no_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for source, got in ((tmp_path / "none", "no such folder"), (tmp_path, "no checkpoint's folder in it")):
        with pytest.raises(AgreedError) as caught:
            choose(checkpoints, source)
        assert str(caught.value) == f"train.load: there is no checkpoint in {source}; got {got}; {todo}"


def test_the_newest_stay(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (1, 2, 3):
        save(checkpoints, iteration)
    (tmp_path / "iter_0000003/model.pt").unlink()  # does not count
    save(checkpoints, 4, keep=2)
    assert listing(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", "latest"]
    save(checkpoints, 5, keep=1)
    assert listing(tmp_path) == ["iter_0000005", "latest"]


def test_what_another_node_has_copied_stays_until_it_has_a_newer_copy(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    save(checkpoints, 1)
    write_copied(tmp_path, (1,))
    for iteration in (2, 3):
        save(checkpoints, iteration, keep=1)
    assert listing(tmp_path) == [COPIED, "iter_0000001", "iter_0000003", "latest"]
    write_copied(tmp_path, (3,))
    save(checkpoints, 4, keep=1)
    assert listing(tmp_path) == [COPIED, "iter_0000003", "iter_0000004", "latest"]


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path: Path, ranks: Ranks) -> None:
    """What a kill leaves behind: half a folder; or one that was put aside for another of its name."""
    whole = save(Checkpoints(tmp_path, ranks, TORCH), 1)
    (tmp_path / ".iter_0000002.part/iter_0000002").mkdir(parents=True)
    whole.rename(tmp_path / ".iter_0000001.old")
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    assert is_complete(whole)
    assert choose(checkpoints, tmp_path) == ("iter_0000001", {})
    save(checkpoints, 2)
    assert listing(tmp_path) == ["iter_0000001", "iter_0000002", "latest"]
    shutil.copytree(whole, tmp_path / ".iter_0000001.old")
    Checkpoints(tmp_path, ranks, TORCH)
    assert listing(tmp_path) == ["iter_0000001", "iter_0000002", "latest"]


def test_a_checkpoint_is_replaced_by_another_of_its_name(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    (save(checkpoints, 3) / "model.pt").write_bytes(b"old")
    assert (save(checkpoints, 3) / "model.pt").stat().st_size == 100
    assert listing(tmp_path) == ["iter_0000003", "latest"]


@pytest.mark.parametrize(("error", "got"), [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (RuntimeError("[enforce fail at inline_container.cc:664]"), "a file cut short (is the disk full?)"),
])  # fmt: skip
def test_a_failed_save_leaves_the_one_before(tmp_path: Path, ranks: Ranks, error: Exception, got: str) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    save(checkpoints, 1)

    def prepare(folder: Path, _shared: bool, _background: object) -> Write:
        def write() -> None:
            (folder / "model.pt").write_bytes(b"half")
            raise error

        return write

    write = checkpoints.start(prepare, 2, {})
    with pytest.raises(AgreedError) as caught:
        write()
    assert caught.value.error.exit_code == 4
    assert str(caught.value) == (
        f"{tmp_path}/iter_0000002: the checkpoint could not be written; got {got}; "
        "free space there or fix its permissions; resume the last complete one with train.load"
    )
    assert listing(tmp_path) == ["iter_0000001", "latest"]
    assert choose(checkpoints, tmp_path) == ("iter_0000001", {})


def test_a_checkpoint_without_a_file_that_is_needed(tmp_path: Path, ranks: Ranks) -> None:
    """Another rank could not write it, and said so."""
    with pytest.raises(AgreedError) as caught:
        Checkpoints(tmp_path, ranks, TORCH).start(lambda *_: lambda: None, 2, {}, ["ddp.pt"])()
    assert str(caught.value) == (
        f"{tmp_path}/iter_0000002: the checkpoint lacks a file; got ddp.pt; "
        "look for another rank's message in logs/rank-<N>.log"
    )
    assert listing(tmp_path) == []
