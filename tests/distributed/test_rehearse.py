"""`tridock rehearse`: a real run of the small experiment loses a rank, and nothing of it is left but its folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cases import thinned
from tests.distributed.ranks import ROOT, rank_environment, read_lines
from tests.patience import STEP_S, WORK_S
from tridock.contracts.run_folder import EXPERIMENT
from tridock.data.corpus import prepare_demo
from tridock.experiment import load_experiment
from tridock.node.agent.processes import find_processes

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a little demo data."""
    folder = tmp_path_factory.mktemp("workspace")
    prepare_demo(folder / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=1_000_000)
    return folder


class Rehearsal:
    """`tridock rehearse` in a workspace, with a folder of its own for temporary files."""

    def __init__(self, workspace: Path, *arguments: str) -> None:
        self.workspace, self.scratch = workspace, Path(tempfile.mkdtemp())
        self.files = self.others()
        argv = [sys.executable, "-m", "tridock.cli", "rehearse", *arguments]
        env = rank_environment() | {"TMPDIR": str(self.scratch)}
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(argv, env=env, cwd=workspace, text=True, **pipe)  # type: ignore[call-overload]

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever has gone wrong, nothing of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.communicate(timeout=STEP_S)

    def others(self) -> list[Path]:
        """What is in the workspace besides runs."""
        return sorted(path for path in self.workspace.rglob("*") if "runs" not in path.parts)

    def end(self, code: int = 0) -> tuple[str, Path]:
        """Its output and its run's folder: all that it leaves."""
        output, _ = self.process.communicate(timeout=WORK_S)
        assert self.process.returncode == code, output
        line = next(it for it in map(str.strip, output.splitlines()) if it.startswith(f"{self.workspace}/runs/"))
        line = line.split()[0]
        assert self.others() == self.files
        assert [path.name for path in self.scratch.iterdir() if "tridock" in path.name] == []
        assert find_processes(Path(line).name) == []
        return output, Path(line)


@pytest.mark.parametrize("tensor", thinned([1, 2], [1]))
def test_a_pipeline_from_transformers_weights(demo: Path, tensor: int) -> None:
    arguments = [
        *("--nodes", "1", "--gpus-per-node", f"{2 * tensor}", "--set", f"parallel.tensor_model_parallel_size={tensor}"),
        *("--set", "model={preset: llama-3.2-1b, vocab_size: null, seq_length: 2048, hidden_dropout: 0.1}"),
        *("--set", "train.load=hf:models/llama", "--set", "precision=bf16"),
        *("--set", "train.sample_prompts=['def ']", "--set", "train.eval_interval=100"),
    ]
    before = set(demo.glob("runs/*"))
    with Rehearsal(demo, str(ROOT / "configs/demo-3d.yaml"), *arguments, "--json") as rehearsal:
        output, run = rehearsal.end()
    output, _, text = output.partition("\n{\n")
    found = json.loads(f"{{{text}")
    assert (found["trained"]["run"], len(found["trained"]["losses"])) == (str(run), 24)
    assert (found["repeated"]["differing"], found["lost"]["rank"]) == ([], 2 * tensor - 1)
    assert found["shrunk"]["model.num_layers"] == "16 to 4"
    assert "def " in found["sampled"]
    assert f"real sizes  can run · TP{tensor} PP2 DP1 · {2 * tensor} ranks" in output
    assert f"trained     TP{tensor} PP2 DP1 on {2 * tensor} ranks, 24 iterations" in output
    assert "equal to the last bit" in output
    assert "loaded      train.load hf: of these weights" in output
    assert "\n  model.num_layers               16 to 4\n" in output
    assert "models/llama is not on this machine\n" in output
    assert set(run.parent.iterdir()) - before == {run}
    assert set((run / "rehearsal.txt").read_text().splitlines()) <= set(output.splitlines())
    events = read_lines(run / "events.jsonl")
    (restarted,) = (event for event in events if event["event"] == "run_restarted")
    assert restarted["reason"].startswith(f"rank {2 * tensor - 1} on localhost was ended by SIGKILL after iteration ")
    assert [event["iteration"] for event in events if event["event"] == "checkpoint_loaded"] == [restarted["iteration"]]
    small = load_experiment(run / EXPERIMENT)
    assert (small.name, small.precision, small.model.normalization) == ("demo-3d-rehearsal", "bf16", "RMSNorm")


@pytest.mark.full  # the steps of the one above
def test_zero_without_the_data(tmp_path: Path) -> None:
    arguments = ["--set", "parallel.zero_stage=2", "--set", "data.data_path=data/none/text_document"]
    with Rehearsal(tmp_path, str(ROOT / "configs/demo.yaml"), *arguments) as rehearsal:
        output, run = rehearsal.end()
    assert "2 slots are assumed: give --hosts or --nodes\n" in output
    assert "trained     TP1 PP1 DP2 on 2 ranks" in output
    assert "equal to the last bit" in output
    assert "data/none/text_document is not on this machine: demo data of 4,096 tokens were used\n" in output
    assert (run / "ds_config.json").is_file()


PROGRAM = """\
import os, time
from pathlib import Path

rank, state = int(os.environ["RANK"]), Path(os.environ["TRIDOCK_RUN_FOLDER"], "state")
for step in range(int(state.read_text()) + 1 if state.exists() else 1, 10**6):
    if rank == 0:
        print(f"step={step} loss={1 / step!r}", flush=True)
        if step % 50 == 0:
            state.write_text(str(step))
    time.sleep(0.02)
"""


def test_a_program_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(PROGRAM)
    config = tmp_path / "run.yaml"
    config.write_text("name: own\nengine: command\ncommand: [python, train.py]\ncode: code\nmetrics: key=value\n")
    with Rehearsal(tmp_path, str(config), "--nodes", "4", "--gpus-per-node", "8") as rehearsal:
        output, run = rehearsal.end()
    assert list((tmp_path / "runs").iterdir()) == [run]
    assert "own: 32 ranks on 4 nodes" in output
    assert "ran         python train.py on 2 ranks" in output
    lost = next(line for line in output.splitlines() if line.startswith("lost "))
    assert lost.startswith("lost        rank 1, killed after iteration ")
    assert int(lost.rpartition(" ")[2]) % 50 == 0
    assert int(lost.rpartition(" ")[2]) >= 50
    assert "equal to the last bit" in output
    assert "they are the program's own: give it small ones" in output
    assert find_processes(run.name) == []


@pytest.mark.full  # test_several_nodes.py: Ctrl-C of a run
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything(demo: Path, number: signal.Signals) -> None:
    runs = demo / "runs"
    before = set(runs.glob("*"))
    with Rehearsal(demo, str(ROOT / "configs/demo.yaml")) as rehearsal:
        deadline = time.monotonic() + WORK_S
        while not any((run / "metrics.jsonl").exists() for run in set(runs.glob("demo-*")) - before):
            assert time.monotonic() < deadline
            assert rehearsal.process.poll() is None, rehearsal.process.communicate()[0]
            time.sleep(0.05)
        rehearsal.process.send_signal(number)
        rehearsal.end(130)
