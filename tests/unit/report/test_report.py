"""A run's table and loss curve, from folders as runs leave them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from tridock.errors import RequestError
from tridock.experiment import Experiment, dump_experiment
from tridock.report.charts import plot_loss
from tridock.report.subject import of_run
from tridock.report.summary import Summary, render_table, rows_of, summarize
from tridock.report.theme import SERIES


def make_run(folder: Path, iterations: int = 4, **fields: Any) -> Path:
    base: dict[str, Any] = {
        "name": "a",
        "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 16},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "data": {"data_path": "data/x"},
        "train": {"train_iters": 10},
    }
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(dump_experiment(Experiment.model_validate(base | fields)))
    ranks = [{"rank": rank, "node": node, "slot": rank % 2} for rank, node in enumerate(("n1", "n1", "n2"))]
    plan = {"world_size": 3, "layout": "TP1 PP1 DP3", "ranks": ranks}
    (folder / "plan.json").write_text(json.dumps(plan))
    metrics: list[dict[str, Any]] = [
        {"iteration": n, "loss": 8.0 - n, "tokens_per_second": 100.0 * n, "consumed_samples": 8 * n}
        for n in range(1, iterations + 1)
    ]
    if iterations:
        metrics += [{"iteration": 2, "split": "valid", "loss": 7.5}, {"iteration": 4, "split": "valid", "loss": 5.5}]
        metrics += [{"iteration": 4, "split": "test", "loss": 5.75}]
        write_lines(folder / "metrics.jsonl", metrics)
    start = {"time": "2026-01-01T00:00:00.000+00:00", "event": "run_started"}
    end: dict[str, Any] = {"time": "2026-01-01T00:01:30.500+00:00", "event": "run_finished"}
    end |= {"device": "cpu", "peak_memory_bytes": 3 << 29}
    built = {"time": "2026-01-01T00:00:10.000+00:00", "event": "model_built", "parameters": 5, "padded_vocab_size": 64}
    write_lines(folder / "events.jsonl", [start, built, end])
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def rendered(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render_table(f"Run {summary.run_id}", rows_of(summary)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_figures_of_a_finished_run(tmp_path: Path) -> None:
    assert summarize(make_run(tmp_path / "a-1")) == Summary(
        run_id="a-1",
        state="finished",
        model="GPT, 2 layers, hidden 8, 2 heads, sequence 16, bf16",
        layout="TP1 PP1 DP3, ZeRO-0",
        nodes=2,
        ranks=3,
        iterations=4,
        train_iters=10,
        unit="tokens",
        tokens=4 * 8 * 16,
        tokens_per_second=300.0,
        first_loss=7.0,
        last_loss=4.0,
        valid_loss=5.5,
        test_loss=5.75,
        seconds=90.5,
        peak_memory_bytes=3 << 29,
        # 300 tokens/s on 3 ranks: 100 a rank, 6 FLOPs a weight of the matrices, and the attention's.
        model_tflops_per_rank=100 * (6 * (2 * 12 * 8 * 8 + 64 * 8) + 2 * 12 * 16 * 8) / 1e12,
        mfu=None,
    )


def test_the_utilization_of_a_known_gpu(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a-1")
    events = (folder / "events.jsonl").read_text().replace('"cpu"', '"Tesla V100-SXM2-16GB"')
    (folder / "events.jsonl").write_text(events)
    summary = summarize(folder)
    assert summary.model_tflops_per_rank is not None
    assert summary.mfu == pytest.approx(summary.model_tflops_per_rank / 125.0)
    assert "1.54e-06 TFLOP/s, MFU 0.0%" in rendered(summary)


def test_the_table(tmp_path: Path) -> None:
    text = rendered(summarize(make_run(tmp_path / "a-1")))
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines() if "│" in line]
    assert rows == [
        ["state", "finished"],
        ["nodes", "2"],
        ["ranks", "3"],
        ["layout", "TP1 PP1 DP3, ZeRO-0"],
        ["model", "GPT, 2 layers, hidden 8, 2 heads, sequence 16, bf16"],
        ["trained", "4 of 10 iterations, 512 tokens"],
        ["tokens/s (median)", "300"],
        ["first loss", "7.0000"],
        ["last loss", "4.0000"],
        ["validation loss", "5.5000"],
        ["test loss", "5.7500"],
        ["model FLOP/s per rank", "1.54e-06 TFLOP/s"],
        ["peak memory per rank", "1.50 GiB"],
        ["time", "0:01:30"],
    ]
    assert text.startswith("Run a-1")


def test_a_run_that_has_only_started(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a-1", iterations=0)
    (folder / "events.jsonl").unlink()
    (folder / "plan.json").unlink()
    summary = summarize(folder)
    assert (summary.state, summary.iterations, summary.tokens) == ("not started", 0, 0)
    assert {summary.nodes, summary.ranks, summary.first_loss, summary.seconds, summary.tokens_per_second} == {None}
    assert rendered(summary).count(" - ") == 10


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (["run_started"], "running"),
        (["run_started", "run_failed:no data", "run_failed:lost a rank"], "failed: no data"),
        (["run_started", "run_failed:no data", "run_started", "world_formed"], "running"),
        (["run_started", "run_stopped", "run_failed:stopped by SIGTERM", "launcher_ended"], "stopped"),
        (["run_started", "run_failed:no data", "launcher_ended"], "failed: no data"),
        (["launcher_ended"], "failed: the launcher ended with exit code 7"),
        (["run_started", "run_finished"], "finished"),
        (["run_started", "run_preempted"], "preempted"),
        (["run_started", "run_failed:lost a rank", "rank_died:was ended"], "failed: rank 1 on b was ended"),
        (["run_started", "node_lost:has not answered"], "failed: rank 1 on b has not answered"),
        (["run_started", "rank_died:was ended", "run_restarted", "run_started"], "running"),
        (["run_started", "run_stopped", "rank_died:was ended"], "stopped"),
    ],
)
def test_the_state(tmp_path: Path, names: list[str], state: str) -> None:
    folder = make_run(tmp_path / "a-1")
    events = []
    for number, name in enumerate(names):
        event, _, reason = name.partition(":")
        record = {
            "time": f"2026-01-01T00:00:{number:02d}.000+00:00",
            "event": event,
            "exit_code": 7,
            "rank": 1,
            "node": "b",
        }
        events.append(record | ({"reason": reason} if reason else {}))
    write_lines(folder / "events.jsonl", events)
    assert summarize(folder).state == state


def test_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a-1")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "lo')
    assert summarize(folder).iterations == 4


def test_iterations_done_again_count_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a-1")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "loss": 3.5, "tokens_per_second": 1.0, "consumed_samples": 32}\n')
    assert (summarize(folder).iterations, summarize(folder).last_loss) == (4, 3.5)


@pytest.mark.parametrize("iterations", [1, 4, 400])
def test_the_curve_is_a_picture(tmp_path: Path, iterations: int) -> None:
    folder = make_run(tmp_path / "a-1", iterations=iterations)
    plot_loss(of_run(folder), tmp_path / "pictures/loss.png")
    with Image.open(tmp_path / "pictures/loss.png") as picture:
        colours = {bytes(colour) for _, colour in picture.convert("RGB").getcolors(1 << 20) or []}
    assert {bytes.fromhex(colour[1:]) for colour in SERIES[:3]} <= colours


def test_what_is_no_run(tmp_path: Path) -> None:
    for folder, got in ((tmp_path / "none", "no such folder"), (tmp_path, "no experiment.yaml in it")):
        for action in (summarize, of_run):
            with pytest.raises(RequestError) as caught:
                action(folder)
            assert str(caught.value) == f"{folder}: is not a run's folder; got {got}; give runs/<run-id>"


def test_nothing_to_draw(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a-1", iterations=0)
    with pytest.raises(RequestError) as caught:
        plot_loss(of_run(folder), tmp_path / "x.png")
    assert str(caught.value) == (
        f"{folder}/metrics.jsonl: has no loss; got no logged iteration; "
        "wait for the first logged iteration, or see the run's logs"
    )
