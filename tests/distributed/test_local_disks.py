"""Two nodes of two ranks each, with disks of their own: every engine saves, resumes there and elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.disks import run_on
from tests.distributed.ranks import Started, losses, make_data, make_run, read_lines
from tridock.contracts.checkpoint_files import is_complete

pytestmark = pytest.mark.distributed

CORE = {"engine": "megatron-core", "parallel.strategy": "ddp"}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    "zero2": {"parallel.strategy": "zero", "parallel.zero_stage": 2},
    "zero3": {"parallel.strategy": "zero", "parallel.zero_stage": 3},
    "fsdp": {"parallel.strategy": "fsdp"},
    "tensor": {"parallel.strategy": "ddp", "parallel.tensor_model_parallel_size": 2},
    "pipeline": {"parallel.strategy": "ddp", "parallel.pipeline_model_parallel_size": 2},
    "megatron-core": CORE | {"parallel.tensor_model_parallel_size": 2},
    "megatron-core-pipeline": CORE | {"parallel.pipeline_model_parallel_size": 2},
    "megatron-core-optimizer": CORE | {"parallel.use_distributed_optimizer": True},
}
SOME = ("zero3", "megatron-core")
PROGRAM = {"megatron-core": "tridock.train.megatron_core.pretrain_gpt"}


@pytest.fixture(scope="module", params=thinned(ENGINES, SOME))
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def first(engine: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """An engine's fields, and a folder with nodes ``a`` and ``b`` on which it has saved after step 4 and at the end."""
    fields, base = engine, tmp_path_factory.mktemp("nodes")
    for node in ("a", "b"):
        make_data(base / node)
    output = train(base, "first", ["a", "a", "b", "b"], fields | {"train.save": True, "train.save_interval": 4})
    assert "GB exchanged" not in output
    return fields, base


def train(base: Path, name: str, nodes: Sequence[str], fields: Mapping[str, Any], full: str = "") -> str:
    """Trains with a rank on each of these nodes; returns what they print. The disk of node ``full`` is."""
    program = PROGRAM.get(str(fields.get("engine")), "tridock.train")
    deepspeed = "deepspeed" if fields["parallel.strategy"] == "zero" else "torch"
    folders = {node: make_run(base / node, name, len(nodes), **fields) for node in dict.fromkeys(nodes)}
    argvs = {
        node: ["-m", *(["tests.distributed.no_index"] if node == full else []), program, "--run-folder", str(folder)]
        for node, folder in folders.items()
    }
    imports = "megatron-core" if "engine" in fields else deepspeed
    return run_on(nodes, folders, argvs, {}, imports, code=4 if full else 0)


def check(base: Path, name: str, node: str) -> None:
    """The run's losses after step 4 are those of the first run, to the last bit."""
    expected = {place: loss for place, loss in losses(base / "a" / "runs" / "first").items() if place[0] > 4}
    assert losses(base / node / "runs" / name) == expected


def test_the_same_nodes_copy_nothing(first: tuple[dict[str, Any], Path]) -> None:
    fields, base = first
    output = train(base, "same", ["a", "a", "b", "b"], fields | {"train.load": "runs/first/checkpoints/iter_0000004"})
    assert "GB exchanged" not in output
    check(base, "same", "a")


MOVED = {
    "swapped": ["b", "b", "a", "a"],
    "with a new one": ["a", "b", "c", "c"],
}


@pytest.mark.parametrize("nodes", thinned(MOVED.values(), [MOVED["with a new one"]]), ids=MOVED)
def test_other_nodes_get_what_they_lack(first: tuple[dict[str, Any], Path], nodes: list[str]) -> None:
    fields, base = first
    name = "".join(nodes)
    if not (base / "c").exists():
        make_data(base / "c")
    for node in set(nodes):  # each test begins with what the first run has left
        shutil.rmtree(base / node / "runs" / "copy", ignore_errors=True)
        if (base / node / "runs" / "first").exists():
            shutil.copytree(base / node / "runs" / "first", base / node / "runs" / "copy")
    train(base, name, nodes, fields | {"train.load": "runs/copy/checkpoints/iter_0000004"})
    check(base, name, nodes[0])
    for node in set(nodes):
        assert is_complete(base / node / "runs" / "copy" / "checkpoints" / "iter_0000004")


def test_a_lost_node_costs_no_checkpoint_of_which_there_are_copies(tmp_path: Path, engine: dict[str, Any]) -> None:
    for node in ("a", "b", "c"):
        make_data(tmp_path / node)
    fields = engine | {"train.save": True, "train.checkpoint_copies": 2}
    train(tmp_path, "first", ["a", "a", "b", "b"], fields | {"train.save_interval": 4})
    copied = [
        it["iteration"]
        for it in read_lines(tmp_path / "a/runs/first/events.jsonl")
        if it["event"] == "checkpoint_copied"
    ]
    assert copied == [4, 8]
    for lost, other in (("a", "b"), ("b", "a")):
        run, own = tmp_path / other / "runs" / "first", tmp_path / other / "runs" / f"without-{lost}"
        shutil.copytree(run, own)
        load = {"train.load": f"runs/without-{lost}/checkpoints/iter_0000004"}
        train(tmp_path, f"from-{other}", [other, other, "c", "c"], engine | load)
        expected = {place: loss for place, loss in losses(tmp_path / "a/runs/first").items() if place[0] > 4}
        assert losses(tmp_path / other / "runs" / f"from-{other}") == expected


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("fsdp", "a"),
        ("megatron-core", "b"),
        pytest.param("fsdp", "b", marks=pytest.mark.full),
        pytest.param("megatron-core", "a", marks=pytest.mark.full),
    ],
)
def test_a_node_without_room_for_the_index_ends_the_save_on_all(tmp_path: Path, name: str, full: str) -> None:
    """No rank waits for one that could not write."""
    for node in ("a", "b"):
        make_data(tmp_path / node)
    output = train(tmp_path, "full", ["a", "a", "b", "b"], ENGINES[name] | {"train.save": True}, full)
    rank = 0 if full == "a" else 2
    assert f"rank {rank}: {tmp_path}/{full}/runs/full/checkpoints/iter_0000008: the checkpoint could not be" in output
    assert "No space left on device" in output


def test_a_damaged_file_comes_from_another_node(tmp_path: Path) -> None:
    fields = ENGINES["ddp"]
    for node in ("a", "b"):
        make_data(tmp_path / node)
    train(tmp_path, "first", ["a", "a", "b", "b"], fields | {"train.save": True, "train.save_interval": 4})
    checkpoint = tmp_path / "a/runs/first/checkpoints/iter_0000004"
    content = bytearray((checkpoint / "ddp.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "ddp.pt").write_bytes(content)
    load = {"train.load": "runs/first/checkpoints/iter_0000004"}
    assert "1 file, " in train(tmp_path, "mended", ["a", "a", "b", "b"], fields | load)
    check(tmp_path, "mended", "a")
    assert (checkpoint / "ddp.pt").read_bytes() != content


def test_what_does_not_arrive_whole_is_not_taken(tmp_path: Path) -> None:
    folders = [tmp_path / "from", tmp_path / "to"]
    folders[1].mkdir()
    (folders[1] / "in").touch()  # a file where a folder has to be
    argv = ["-m", "tests.distributed.sent_files", *map(str, folders)]
    with Started(argv, tmp_path, 2, {}) as started:
        finished = started.wait()
    assert finished.codes == [0, 0], finished.err
    lines = finished.out[1].splitlines()
    assert [line.partition(": ")[0].removeprefix(f"{folders[1]}/") for line in lines] == [
        "changed",
        "gone",
        "in/the",
        "short",
    ]
    assert all("did not arrive whole from rank 0" in line for line in (lines[0], lines[1], lines[3]))
    assert "could not be written; got File exists" in lines[2] or "Not a directory" in lines[2]
    taken = sorted(path.relative_to(folders[1]).as_posix() for path in folders[1].rglob("*") if path.is_file())
    assert taken == ["deep/er", "empty", "in", "whole"]
    assert (folders[1] / "whole").read_bytes() == (folders[0] / "whole").read_bytes()
    assert finished.out[0] == ""
