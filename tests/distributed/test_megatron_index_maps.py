"""Index maps made before a run are those that its ranks would make, and its ranks make none then."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import free_port, rank_environment
from tests.distributed.test_megatron_v115 import PP, TP, WARMUP, ZERO, experiment, train
from tests.experiments import make_plan
from tests.patience import WORK_S
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.engines.megatron_lm.program import INDEX_MAPS, index_map_arguments
from tridock.experiment import dump_experiment

pytestmark = pytest.mark.distributed

DATA = "data/demo"
SHORT = {"train.train_iters": 3, "train.eval_interval": 2, WARMUP: 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulated": (2, {ZERO: 1, "batch.micro_batch_size": 2, "batch.global_batch_size": 12}),
    "stages": (
        2,
        {PP: 2, ZERO: 1, "train.seed": 7, "model.checkpoint_activations": True, "model.partition_activations": True},
    ),
}


@pytest.fixture(scope="module")
def data(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_demo(folder / DATA, vocab_size=500, report=lambda _: None, corpus_bytes=300_000)
    return folder


@pytest.fixture
def workspace(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data, tmp_path / "workspace")
    return tmp_path / "workspace"


def make(
    workspace: Path, source: Path, ranks: int, options: tuple[str, ...] = (), **fields: Any
) -> subprocess.CompletedProcess[str]:
    given = experiment(**SHORT, **fields)
    plan = make_plan(given, {"localhost": range(ranks)}, "e.yaml")
    arguments = index_map_arguments(given.resolved(plan.data_parallel_size), plan, str(workspace))
    # As in a rank's environment: it must not matter to whom it belongs.
    env = {**os.environ, "TRIDOCK_MEGATRON": str(source), "RANK": "3", "WORLD_SIZE": "4", "MASTER_PORT": "1"}
    command = [sys.executable, "-P", "-m", INDEX_MAPS, *arguments, *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=WORK_S)


def maps(workspace: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (workspace / DATA).glob("*_indexmap*")}


def identity(workspace: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (workspace / DATA).iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_those_of_a_run_which_then_makes_none(
    workspace: Path, source: Path, tmp_path: Path, layout: str
) -> None:
    ranks, fields = LAYOUTS[layout]
    alone = tmp_path / "alone"
    shutil.copytree(workspace, alone)
    _, finished = train(alone, source, layout, ranks, **SHORT, **fields)
    assert finished.codes == [0] * ranks, finished.out[0][-5000:]

    before = {path.name for path in (workspace / DATA).iterdir()}
    done = make(workspace, source, ranks, **fields)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["made"] == 9
    assert {path.name for path in (workspace / DATA).iterdir()} - before == {*answer["files"]}
    assert len(maps(workspace)) == 10
    assert maps(workspace) == maps(alone)

    made = identity(workspace)
    again = make(workspace, source, ranks, **fields)
    assert json.loads(again.stdout) == {"made": 0, "files": answer["files"], "problems": []}
    _, finished = train(workspace, source, layout, ranks, **SHORT, **fields)
    assert finished.codes == [0] * ranks, finished.out[0][-5000:]
    assert identity(workspace) == made


def test_maps_of_which_a_part_is_missing_and_those_of_other_data_are_rebuilt(workspace: Path, source: Path) -> None:
    assert json.loads(make(workspace, source, 1).stdout)["made"] == 9
    whole, kept = maps(workspace), identity(workspace)
    (victim,) = (workspace / DATA).glob("*_valid_*_shuffle_idx.npy")
    victim.unlink()
    assert json.loads(make(workspace, source, 1).stdout)["made"] == 3
    assert maps(workspace) == whole
    changed = {name for name, was in identity(workspace).items() if was != kept[name]}
    assert len(changed) == 3
    assert all("_valid_indexmap_" in name for name in changed)
    other = json.loads(make(workspace, source, 1, **{"data.split": "70,20,10"}).stdout)
    assert other["made"] == 9
    assert maps(workspace) != whole


class Evil:
    """Does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_map_that_is_a_pickle_is_refused_by_name_and_runs_nothing(
    workspace: Path, source: Path, tmp_path: Path
) -> None:
    """It comes with the data, and ``_indexmap.sha256`` says that it belongs to them."""
    assert make(workspace, source, 1).returncode == 0
    (victim,) = (workspace / DATA).glob("*_train_*_doc_idx.npy")
    victim.write_bytes(pickle.dumps(Evil(tmp_path / "done")))
    refused = f"{victim}: is no array of NumPy, as every index map is; remove it: a run makes its index maps itself"
    done = make(workspace, source, 1)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, refused)
    _, finished = train(workspace, source, "hostile", 1, **SHORT)
    assert finished.codes == [2]
    assert refused in finished.out[0]
    assert not (tmp_path / "done").exists()


def test_what_cannot_be_done_is_said_in_one_line(workspace: Path, source: Path, tmp_path: Path) -> None:
    done = make(workspace, tmp_path / "nothing", 1)
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert (answer["made"], answer["files"]) == (0, [])
    assert [problem["what"] for problem in answer["problems"]] == ["Megatron-LM v1.1.5 is not installed"]
    assert done.stderr.strip().splitlines()[-1] == (
        f"engine: Megatron-LM v1.1.5 is not installed; got {tmp_path}/nothing; "
        "build the image with its source (tridock image --megatron WHERE), or name its folder in TRIDOCK_MEGATRON"
    )
    done = make(workspace, source, 1, ("--nonsense",))
    assert done.returncode == 4
    assert done.stderr.strip().splitlines()[-1] == (
        "index maps: Megatron exited; got exit code 2; see megatron_args of the experiment"
    )
    shutil.rmtree(workspace / DATA)
    assert make(workspace, source, 1).returncode == 2


def test_tensor_parallel_ranks_count_as_one(workspace: Path, source: Path) -> None:
    made = make(workspace, source, 2, **{TP: 2})
    assert sorted(json.loads(made.stdout)["files"]) == sorted(maps(workspace))
    assert any("_train_indexmap_24ns_" in name for name in maps(workspace))


def test_a_node_whose_first_rank_reads_no_data_finds_them(workspace: Path, source: Path, tmp_path: Path) -> None:
    """Of four stages on two nodes that share nothing: the last stage reads data, and is no node's first rank."""
    nodes, fields, name = (workspace, tmp_path / "other"), {PP: 4, ZERO: 1}, "four"
    assert json.loads(make(workspace, source, 4, **fields).stdout)["made"] == 9
    shutil.copytree(workspace, nodes[1])
    before = identity(nodes[1])
    plan = make_plan(experiment(**SHORT, **fields), {"node-1": range(2), "node-2": range(2)}, name)
    given, port, processes = experiment(**SHORT, **fields).resolved(1), str(free_port()), []
    for rank in range(4):
        folder = nodes[rank // 2] / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        program = rank_program(given, plan, name, str(folder))
        (folder / "experiment.yaml").write_text(dump_experiment(given))
        for file, content in program.files.items():
            (folder / file).write_bytes(content)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        env = rank_environment() | program.env | place | {"MASTER_PORT": port, "TRIDOCK_MEGATRON": str(source)}
        command = [sys.executable, "-m", program.module, *program.arguments]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [process.communicate(timeout=WORK_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said[-1][-5000:]
    assert identity(nodes[1]) == before
