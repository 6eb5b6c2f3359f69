"""What a launcher sees of the ranks: exit codes, output, files; whole runs, refusals, deaths."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.ranks import (
    VOCABULARY,
    Finished,
    Started,
    events,
    free_port,
    imports_of,
    losses,
    make_data,
    make_run,
    metrics,
    place,
    process,
    rank_environment,
    read_lines,
    run,
    start,
)
from tests.patience import WORK_S
from tridock.data.corpus import prepare_demo

pytestmark = pytest.mark.distributed

ZERO3 = {"parallel.strategy": "zero", "parallel.zero_stage": 3}
LAYOUTS = pytest.mark.parametrize("layout", [{}, ZERO3], ids=["ddp", "zero3"])


def assert_clean(finished: Finished) -> None:
    assert finished.codes == [0] * len(finished.codes), finished.err
    # The copy of each rank's log carries what it wrote to standard error as well.
    for text in (*finished.out, *finished.err):
        for mark in ("terminate called", "Traceback", "leaked", "Warning", "destroy_process_group"):
            assert mark not in text


@LAYOUTS
def test_a_whole_run(workspace: Path, layout: dict[str, object]) -> None:
    name = f"whole-{len(layout)}"
    fields = {"train.tensorboard": True, "train.save": True, "train.eval_interval": 4, "train.log_interval": 3}
    folder = make_run(workspace, name, 2, **layout, **fields)
    finished = run(folder, 2, from_scratch=True, TRIDOCK_WORLD_SIZE="2")
    assert_clean(finished)
    assert finished.out[1] == ""
    lines = finished.out[0].splitlines()
    assert lines[0].startswith(
        "small: 0.03 M parameters, " + ("zero stage 3" if layout else "ddp") + ", fp32, 2 cpu ranks"
    )
    logged = [line for line in lines if line.startswith("iteration")]
    assert [line.split(" | ")[0] for line in logged] == [f"iteration {n}/8" for n in (1, 3, 6, 8)]
    assert [part.split(" ")[0] for part in logged[0].split(" | ")[1:4]] == ["loss", "lr", "grad"]
    assert logged[-1].endswith(" tokens/s | 0:00:00 left")
    assert (folder / "logs/rank-0.log").read_text() == finished.out[0]
    assert (folder / "logs/rank-1.log").exists()
    assert sorted(metrics(folder)) == [
        (1, "train"), (3, "train"), (4, "valid"), (6, "train"), (8, "test"), (8, "train"), (8, "valid"),
    ]  # fmt: skip
    assert events(folder) == [
        "run_started",
        "world_formed",
        "model_built",
        "evaluation",
        "evaluation",
        "checkpoint_saved",
        "evaluation",
        "run_finished",
    ]
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert losses(folder)[(8, "train")] < losses(folder)[(1, "train")] - 0.3


@pytest.mark.full  # test_same_losses.py, with every strategy
def test_a_run_continues_in_a_new_process(workspace: Path) -> None:
    fields = {"train.save": True, "model.hidden_dropout": 0.1}
    first = make_run(workspace, "first", 2, **fields, **{"train.train_iters": 3, "optimizer.lr_decay_iters": 6})
    assert_clean(run(first, 2))
    second = make_run(
        workspace, "second", 2, **fields, **{"train.train_iters": 6, "train.load": "runs/first/checkpoints"}
    )
    assert_clean(run(second, 2))
    whole = make_run(workspace, "uninterrupted", 2, **fields, **{"train.train_iters": 6})
    assert_clean(run(whole, 2))
    expected = losses(whole)
    assert losses(second) == {place: loss for place, loss in expected.items() if place[0] > 3}
    assert "checkpoint_loaded" in events(second)


@pytest.mark.full  # tests/integration/test_twin.py: `make demo`
def test_real_text_is_learned(workspace: Path) -> None:
    demo = prepare_demo(workspace / "data/demo", 512, report=lambda _: None, corpus_bytes=400_000)
    folder = make_run(
        workspace,
        "text",
        2,
        **ZERO3,
        **{
            "data.data_path": "data/demo/stdlib_text_document",
            "model.vocab_size": None,
            "model.hidden_size": 64,
            "model.seq_length": 64,
            "batch.micro_batch_size": 4,
            "optimizer.lr": 5e-3,
            "train.train_iters": 60,
            "train.eval_interval": 60,
        },
    )
    finished = run(folder, 2)
    assert_clean(finished)
    found = losses(folder)
    assert found[(1, "train")] == pytest.approx(np.log(512), abs=0.2)
    assert found[(60, "train")] < 5.4
    assert found[(60, "valid")] < 5.4
    assert f"vocabulary of {demo.vocab_size}" in finished.out[0]


# ---- launchers -------------------------------------------------------------------------------------------------------


def launched(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments, "--run-folder", str(folder)],
        env=rank_environment() | {"TRIDOCK_WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=WORK_S,
    )


@pytest.mark.full  # tests/integration: every fab launch
def test_under_deepspeeds_launcher(workspace: Path, tmp_path: Path) -> None:
    folder = make_run(workspace, "deepspeed", 2, **ZERO3)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    launcher = ["deepspeed.launcher.runner", "--hostfile", str(tmp_path / "hostfile"), "--no_ssh", "--node_rank", "0"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), "--module", "tridock.train"]
    done = launched(launcher, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(folder)[-1] == "run_finished"
    assert "iteration 8/8" in done.stdout


@pytest.mark.full  # every other test of `tridock train`
def test_under_the_starter_of_local_runs(workspace: Path) -> None:
    folder = make_run(workspace, "local", 2, **ZERO3)
    launcher = ["tridock.node", "start-ranks", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = launched([*launcher, "--module", "tridock.train"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(folder)[-1] == "run_finished"
    assert "iteration 8/8" in done.stdout


@pytest.mark.full  # tests/integration/test_slurm.py: on two nodes
def test_under_torchrun(workspace: Path) -> None:
    folder = make_run(workspace, "torchrun", 2)
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = launched([*launcher, "-m", "tridock.train"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(folder)[-1] == "run_finished"


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(folder: Path, code: int, message: str, **env: str) -> None:
    """All ranks leave with the code; rank 0 alone says why, in this message and no other."""
    finished = run(folder, 2, **env)
    assert finished.codes == [code, code]
    assert [line for line in finished.out[0].splitlines() if not line.startswith("small:")] == message.splitlines()
    assert finished.out[1] == ""
    assert finished.err == ["", ""]
    failed = [line for line in read_lines(folder / "events.jsonl") if line["event"] == "run_failed"]
    assert [(line["rank"], line["reason"]) for line in failed] == [(0, message)]


def test_another_world_than_the_planned_one(workspace: Path) -> None:
    message = (
        "world size: the plan has 4 ranks, but another number found each other; got 2; "
        "check the hostfile that the launcher read (logs/launcher.log) and that every node started its ranks"
    )
    refused(make_run(workspace, "mismatch", 2), 4, message, TRIDOCK_WORLD_SIZE="4")


def test_missing_data(workspace: Path) -> None:
    message = (
        f"{workspace}/data/none: there is no indexed data set; got neither none.idx nor none.bin; "
        "build it with `tridock data preprocess`, or correct data.data_path"
    )
    refused(make_run(workspace, "missing", 2, **{"data.data_path": "data/none"}), 2, message)


def test_an_uneven_batch_and_no_checkpoint(workspace: Path) -> None:
    message = (
        "batch.global_batch_size: is no multiple of micro_batch_size x data parallel ranks = 2 x 2; got 6; "
        "use a multiple of 4"
    )
    refused(make_run(workspace, "uneven", 2, **{"batch.global_batch_size": 6}), 2, message)
    message = (
        f"train.load: there is no checkpoint in {workspace}/runs/none; got no such folder; "
        "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    )
    refused(make_run(workspace, "unloaded", 2, **{"train.load": "runs/none"}), 2, message)


def test_a_deepspeed_config_for_other_ranks(workspace: Path) -> None:
    folder = make_run(workspace, "config", 4, **ZERO3)
    todo = "start the run with `tridock launch` or `tridock train`, which write it"
    refused(folder, 2, f"{folder}/ds_config.json: was made for 4 ranks; got 2 ranks; {todo}")
    (folder / "events.jsonl").unlink()
    (folder / "ds_config.json").unlink()
    message = f"{folder}/ds_config.json: cannot be read; strategy zero needs it; got No such file or directory; {todo}"
    refused(folder, 2, message)


def test_a_loss_that_is_no_number(workspace: Path) -> None:
    folder = make_run(workspace, "nan", 2, **{"optimizer.lr": 1e30, "optimizer.clip_grad": 0.0})
    finished = run(folder, 2)
    assert finished.codes == [4, 4]
    said = finished.out[0].splitlines()[-1]
    assert said.startswith("iteration ")
    assert said.endswith(
        ": the loss is not finite; got nan; lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or use bf16 or fp32"
    )
    assert finished.err == ["", ""]


def test_one_ranks_bad_data(workspace: Path) -> None:
    """A token outside the vocabulary that only one rank meets: it says so, the other that it has lost a rank."""
    make_data(workspace, "spoilt")
    path = workspace / "data/spoilt.bin"
    tokens = np.fromfile(path, np.uint16)
    tokens[: len(tokens) // 40] = VOCABULARY + 5
    tokens.tofile(path)
    folder = make_run(workspace, "spoilt", 2, **{"data.data_path": "data/spoilt", "train.train_iters": 500})
    finished = run(folder, 2)
    texts = ["".join(pair) for pair in zip(finished.out, finished.err, strict=True)]
    bad = 0 if "model.vocab_size" in texts[0] else 1
    assert finished.codes[bad] == 2
    assert finished.codes[1 - bad] != 0
    assert texts[bad].splitlines()[-1] == (
        f"rank {bad}: model.vocab_size: is too small for the data; got {VOCABULARY}, and token {VOCABULARY + 5} in the "
        "train split; leave it out, or give the size of the tokenizer of the data"
    )
    assert "Traceback" not in texts[0] + texts[1]


# ---- deaths ----------------------------------------------------------------------------------------------------------

FAILING = """
import tridock.train.trainer as trainer
from tridock.train.__main__ import main
from tridock.train.rank.run import end
step = trainer.Trainer.step
def failing(self, iteration):
    if iteration == 3 and self.ranks.rank == 1:
        raise ValueError("a bug in rank 1")
    return step(self, iteration)
trainer.Trainer.step = failing
end(main())
"""


@LAYOUTS
def test_a_rank_that_raises_ends_all(workspace: Path, layout: dict[str, object], tmp_path: Path) -> None:
    folder = make_run(workspace, f"raising-{len(layout)}", 2, **layout)
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    with Started([str(program), "--run-folder", str(folder)], folder, 2, {}, imports_of(folder)) as started:
        finished = started.wait()
    assert finished.codes == [4, 4]
    assert "rank 1 failed:\nTraceback" in finished.out[1]
    assert finished.out[1].endswith("ValueError: a bug in rank 1\n\n")
    assert finished.out[0].splitlines()[-1].startswith("rank 0: collective: lost the connection to another rank; got ")
    reasons = {line["rank"]: line["reason"] for line in read_lines(folder / "events.jsonl") if "reason" in line}
    assert reasons[1] == "ValueError('a bug in rank 1')"


@LAYOUTS
def test_a_killed_rank_ends_all(workspace: Path, layout: dict[str, object]) -> None:
    folder = make_run(workspace, f"killed-{len(layout)}", 2, **layout, **{"train.train_iters": 10**6})
    with start(folder, 2) as started:
        started.until("iteration")
        started.processes[1].kill()
        finished = started.wait()
    assert finished.codes == [4, -signal.SIGKILL]
    assert (
        finished.out[0]
        .splitlines()[-1]
        .endswith("; look for the rank that failed first: its message is in logs/rank-<N>.log")
    )


@pytest.mark.parametrize(("number", "code", "word"), [
    (signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted"),
])  # fmt: skip
def test_signals_end_a_run(workspace: Path, number: int, code: int, word: str) -> None:
    folder = make_run(workspace, f"signal-{code}", 2, **ZERO3, **{"train.train_iters": 10**6})
    with start(folder, 2) as started:
        started.until("iteration")
        for process in started.processes:
            process.send_signal(number)  # the second may have noticed the end of the first, and gone
        finished = started.wait()
    # Whichever rank comes second may notice the loss of the first before its own signal.
    assert code in finished.codes
    assert set(finished.codes) <= {code, 4}
    said = finished.out[finished.codes.index(code)].splitlines()
    assert f"rank {finished.codes.index(code)}: {word}" in said
    assert "Traceback" not in "".join(finished.out + finished.err)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_fit(workspace: Path) -> None:
    saved = make_run(workspace, "saved", 2, **ZERO3, **{"train.save": True, "train.train_iters": 2})
    assert_clean(run(saved, 2))
    load = {"train.load": "runs/saved/checkpoints", "train.train_iters": 2}
    where = f"the checkpoint {saved}/checkpoints/iter_0000002 was saved with"
    todo = "use the same, or start from scratch"
    fields = load | {"model.num_layers": 3, "parallel.strategy": "zero", "parallel.zero_stage": 2}
    message = (
        f"model.num_layers: {where} 2; got 3; {todo}\n"
        f"parallel.zero_stage: {where} 3; got 2; {todo}\n"
        f"precision: {where} fp32; got bf16; {todo}"
    )
    refused(make_run(workspace, "misfit", 2, **fields, precision="bf16"), 2, message)
    message = (
        f"batch.global_batch_size: {where} 8; got 16; use the same, or choose the new values: "
        "--set 'train.override_checkpoint=[batch.global_batch_size]'"
    )
    refused(make_run(workspace, "other-batch", 2, **ZERO3, **load, **{"batch.global_batch_size": 16}), 2, message)
    lost = saved / "checkpoints/iter_0000002/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    lost.unlink()
    message = (
        f"train.load: no complete checkpoint is in {saved}/checkpoints; "
        "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it\n"
        f"rank 1: {lost}: is missing; restore it, or continue from another checkpoint"
    )
    refused(make_run(workspace, "lost", 2, **ZERO3, **load), 2, message)


@LAYOUTS
def test_nodes_that_share_no_folder(tmp_path: Path, layout: dict[str, object]) -> None:
    """Two ranks with a workspace each, as on two nodes without a shared disk: each keeps what it needs to continue."""

    def run_apart(name: str, **fields: object) -> list[Path]:
        folders = []
        for node in ("one", "two"):
            if not (tmp_path / node / "data").exists():
                make_data(tmp_path / node)
            folders.append(make_run(tmp_path / node, name, 2, **layout, **fields))
        port = free_port()
        processes = [
            process(
                ["-m", "tridock.train", "--run-folder", str(folder)],
                rank_environment() | place(rank, 2, port) | {"LOCAL_RANK": "0"},
                folder / "out",
                folder / "err",
                imports_of(folder),
            )
            for rank, folder in enumerate(folders)
        ]
        assert [one.wait(WORK_S) for one in processes] == [0, 0]
        return folders

    fields = {"train.save": True, "train.save_interval": 4, "model.hidden_dropout": 0.1}
    whole, second = run_apart("whole", **fields)
    for folder in (whole, second):
        assert (folder / "checkpoints/latest").read_text() == "iter_0000008"
        progress = json.loads((folder / "checkpoints/iter_0000004/tridock.json").read_text())
        assert (progress["iteration"], progress["consumed_samples"]) == (4, 32)
        assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")] == []
    part, _ = run_apart("part", **fields, **{"train.load": "runs/whole/checkpoints/iter_0000004"})
    assert losses(part) == {place: loss for place, loss in losses(whole).items() if place[0] > 4}


LIMITED = """
import resource, signal
from tridock.train.__main__ import main
from tridock.train.rank.run import end
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
end(main())
"""


@LAYOUTS
def test_a_checkpoint_that_cannot_be_written(workspace: Path, tmp_path: Path, layout: dict[str, object]) -> None:
    """No room for the file: the run says so and stops, and ``latest`` names no half checkpoint."""
    folder = make_run(workspace, f"full-{len(layout)}", 2, **layout, **{"train.save": True, "train.train_iters": 2})
    program = tmp_path / "limited.py"
    program.write_text(LIMITED)
    with Started([str(program), "--run-folder", str(folder)], folder, 2, {}, imports_of(folder)) as started:
        finished = started.wait()
    assert 0 not in finished.codes
    assert 4 in finished.codes
    text = "".join(finished.out)
    assert f"{folder}/checkpoints/iter_0000002: the checkpoint could not be written; got " in text
    assert "free space there or fix its permissions; resume the last complete one with train.load" in text
    assert "Traceback" not in text
    assert list((folder / "checkpoints").glob("[!z]*")) == []  # DeepSpeed puts its zero_to_fp32.py there
