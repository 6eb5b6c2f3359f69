"""The page and its pictures, of runs and logs of every kind."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.experiments import with_fields
from tests.unit.report import logs
from tridock.cli import main
from tridock.errors import RequestError
from tridock.experiment import dump_experiment
from tridock.gpus import find_gpu
from tridock.plan import Assumptions, assess
from tridock.report.charts import _phase_medians, charts
from tridock.report.page import page, write_report
from tridock.report.subject import of_log, of_run

BASE: dict[str, Any] = {
    "name": "a",
    "engine": "megatron-core",
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32},
    "parallel": {"pipeline_model_parallel_size": 2},
    "batch": {"micro_batch_size": 1, "global_batch_size": 4},
    "data": {"data_path": "data/x"},
    "precision": "fp16",
    "train": {"train_iters": 100},
}
EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "run_started"},
    {"event": "checkpoint_saved", "iteration": 2},
    {"event": "rank_died", "rank": 1, "node": "n2", "reason": "was ended by SIGKILL"},
    {"event": "run_restarted", "attempt": 1},
    {"event": "checkpoint_loaded", "iteration": 2},
    {"event": "run_finished", "device": "Tesla V100-SXM2-16GB", "peak_memory_bytes": 3 << 29},
)


def a_run(
    folder: Path, losses: list[float | None], *, seed: int = 1, events: tuple[dict[str, Any], ...] = EVENTS
) -> Path:
    folder.mkdir(parents=True)
    experiment = with_fields(BASE, {"train.seed": seed})
    known = Assumptions(gpu=find_gpu("v100-16gb", "gpu"))
    (folder / "experiment.yaml").write_text(dump_experiment(experiment))
    (folder / "plan.json").write_text(assess(experiment, {"n1": [0], "n2": [0]}, "a.yaml", known).to_json())
    (folder / "manifest.json").write_text(json.dumps({"run_id": folder.name, "seed": seed, "image_id": "sha256:1"}))
    records: list[dict[str, Any]] = [
        {"iteration": number, "loss": loss, "lr": 0.001, "grad_norm": 1.5, "step_time_s": 0.25,
         "tokens_per_second": 512.0, "consumed_samples": 4 * number, "loss_scale": float(2**number)}
        for number, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    if losses:
        records.append({"iteration": len(losses), "split": "valid", "loss": 3.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = [{"time": f"2026-01-01T00:00:{number:02d}.000+00:00", **event} for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Outline(HTMLParser):
    """What a browser would see: elements that are closed in order, headings, cells, what is asked of the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.ids += [value or "" for name, value in attrs if name == "id" and tag == "section"]
        self.loaded += [given[name] or "" for name in ("src", "data", "poster") if name in given]
        if tag == "link":
            self.loaded.append(given["href"] or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "h3":
            self.titles.append(data)


def outline(text: str) -> Outline:
    found = Outline(text)
    assert "script" not in found.tags
    assert [address for address in found.loaded if not address.startswith("data:")] == []
    assert re.findall(r"url\((?!#|['\"]?#)", text) == []
    assert "@import" not in text
    return found


def read(runs: Sequence[Path], logs: Sequence[Path] = (), *, drawn: bool = False) -> Outline:
    """The page; without its charts, which take their time, unless they are wanted."""
    subjects = [*map(of_run, runs), *(it for path in logs for it in of_log(path))]
    return outline(page(subjects, list(charts(subjects)) if drawn else []))


def test_a_run_is_shown_whole(tmp_path: Path) -> None:
    path, *pictures = write_report([a_run(tmp_path / "a-1", [7.0, 6.0, 5.0, 4.0])], [], tmp_path / "out" / "r.html")
    text = path.read_text()
    found = outline(text)
    assert found.ids == ["summary", "charts", "plan", "layout", "events", "origin"]
    assert found.titles == ["Loss", "Learning rate", "Gradient norm", "Throughput", "Step time", "Loss scale",
                            "Memory per rank"]  # fmt: skip
    assert [path.name for path in pictures] == [
        f"r-{name}.png"
        for name in ("loss", "learning-rate", "gradient-norm", "throughput", "step-time", "loss-scale", "memory")
    ]
    for picture in pictures:
        with Image.open(picture) as image:
            assert min(image.size) > 200
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["state"] == ["finished"]
    assert rows["last loss"] == ["4.0000"]
    assert rows["seed"] == ["1"]
    assert rows["train.seed"] == ["1"]
    assert ["2026-01-01 00:00:02", "rank_died", "rank: 1, node: n2, reason: was ended by SIGKILL"] in found.rows
    assert 'class="fault"' in text


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a-1", [7.0, 6.0])
    plan = json.loads((folder / "plan.json").read_text())
    planned = max(stage["total_bytes"] for stage in plan["memory"]["stages"])
    time = plan["cost"]["estimate"]["iteration"]
    rows = {row[0]: row[1:] for row in read([folder]).rows}
    assert rows["peak memory, highest rank"][1:] == ["1.50 GiB", f"{(3 << 29) / planned - 1:+.1%}"]
    assert rows["step time (median)"][1] == "250 ms"
    assert rows["step time (median)"][2] in (f"{0.25 / time - 1:+.1%}", f"{0.25 / time:,.0f} times")
    assert rows["stage 0"][0] == "2"


def test_what_a_run_proposes_for_other_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The factors of ``tridock plan --from-run``."""
    folder = a_run(tmp_path / "a run", [7.0, 6.0, 5.0])
    main(["plan", "--from-run", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)["from_run"]
    seen = read([folder])
    rows = {row[0]: row[1:] for row in seen.rows}
    assert rows["median step"][1:] == ["250 ms", f"{found['seconds']['factor']:.3g}, kernels and messages"]
    assert rows["tensors, fullest rank"][1:] == ["1.50 GiB", f"{found['memory']['factor']:.3g}"]
    command = f"tridock plan --from-run '{folder}'"
    assert f"Other plans take these factors over with {command}; by 2 iterations." in "".join(seen.text)
    assert "Other plans" not in "".join(read([a_run(tmp_path / "short", [7.0])]).text)


def test_two_runs_are_laid_over_each_other_and_compared(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a-1", [7.0, 6.0, 5.0]), a_run(tmp_path / "a-2", [7.0, 6.5], seed=2)]
    found = read(runs)
    assert "differences" in found.ids
    assert ["field", "a-1", "a-2"] in found.rows
    assert ["seed", "1", "2"] in found.rows
    assert ["train.seed", "1", "2"] in found.rows
    assert [row for row in found.rows if row[0] in ("run_id", "image_id")] == [
        ["run_id", "a-1"], ["image_id", "sha256:1"], ["run_id", "a-2"], ["image_id", "sha256:1"]
    ]  # fmt: skip
    assert ["last loss", "5.0000", "6.5000"] in found.rows


def test_skipped_steps_of_fp16_are_counted_and_drawn(tmp_path: Path) -> None:
    folder, other = a_run(tmp_path / "a-1", [7.0, 6.0, 5.0]), a_run(tmp_path / "a-2", [7.0])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, skips in zip(lines, (1, 4, 0), strict=False):
        line["skipped_steps"] = skips
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ["skipped steps", "5"] in read([folder]).rows
    assert any(row[0] == "skipped steps" and row[1] == "5" for row in read([folder, other]).rows)
    assert "skipped-steps" in [chart.name for chart in charts([of_run(folder)])]
    assert "skipped-steps" not in [chart.name for chart in charts([of_run(other)])]


def test_runs_that_are_the_same_say_so(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, [7.0]) for name in ("a-1", "a-2")]
    found = read(runs)
    assert found.text.count("No differences.") == 2


def test_a_log_stands_alone(tmp_path: Path) -> None:
    text = logs.ARGUMENTS + logs.of_2021(10, 7.5) + logs.TIMES + logs.of_2021(20, 7.25, ms=500.0) + logs.TIMES
    (tmp_path / "x.log").write_text(text + logs.EVALUATED + logs.MEMORY)
    found = read([], [tmp_path / "x.log"])
    rows = {row[0]: row[1:] for row in found.rows}
    assert found.ids == ["summary", "charts", "origin"]
    assert rows["trained"] == ["20 of 100 iterations"]
    assert rows["layout"] == ["TP1 PP2"]
    # 8 samples of 32 tokens in 250 and in 500 ms.
    assert rows["tokens/s (median)"] == ["768"]
    assert rows["seq_length"] == ["32"]
    flops = 768 / 2 * 3 * (2 * (24 * 64**2 + 4 * 32 * 64) + 2 * 64 * 512) / 1e12
    assert rows["model FLOP/s per rank"] == [f"{flops:.3g} TFLOP/s"]


def test_the_throughput_of_a_log_of_v115(tmp_path: Path) -> None:
    """Its arguments name no global batch: 2 samples of a micro batch, 4 of them, on 8 / (2 x 2) replicas."""
    sizes = {"batch_size": 2, "gas": 4, "model_parallel_size": 2, "pipe_parallel_size": 2, "seq_length": 64,
             "world_size": 8}  # fmt: skip
    text = "".join(f"  {name} {'.' * (32 - len(name))} {value}\n" for name, value in sizes.items())
    (tmp_path / "x.log").write_text(text + logs.v115(10, 7.5) + logs.v115(20, 7.0))
    (subject,) = of_log(tmp_path / "x.log")
    rows = dict(subject.rows)
    assert (rows["samples/s (median)"], rows["tokens/s (median)"]) == ("64.00", "4,096")
    assert rows["layout"] == "TP2 PP2"
    without = re.sub(r"(pipe_parallel_size \.+) 2", r"\1 0", text)
    (tmp_path / "y.log").write_text(without + logs.v115(10, 7.5))
    assert dict(of_log(tmp_path / "y.log")[0].rows)["layout"] == "TP2 PP1"  # without a pipeline it says 0


def test_a_run_and_two_logs(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(logs.today(10, 7.5) + logs.TIMES_TODAY)
    (tmp_path / "y.log").write_text(logs.ARGUMENTS + logs.v115(10, 7.5) + logs.v115(20, 7.0))
    run = a_run(tmp_path / "a-1", [7.0, 6.0])
    found = read([run], [tmp_path / "x.log", tmp_path / "y.log"])
    assert ["", "a-1", "x.log", "y.log"] in found.rows
    assert ["last loss", "6.0000", "7.5000", "7.0000"] in found.rows
    assert "differences" not in found.ids  # only one of them has arguments, and a run has none


def test_the_phases_of_a_run_of_megatron_v115_are_in_its_first_ranks_log(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a-1", [7.0, 6.0])
    experiment = with_fields(BASE, {"engine": "megatron-deepspeed", "data.vocab_file": "v", "data.merge_file": "m"})
    (folder / "experiment.yaml").write_text(dump_experiment(experiment))
    assert of_run(folder).phases.names() == []
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text(logs.v115(1, 7.0) + logs.TIMES)
    assert of_run(folder).phases.names() == ["backward-compute", "forward-compute", "optimizer"]


def with_own_figures(folder: Path, ranks: int) -> Path:
    """As today's runs record it: the phases of a step, and what each rank holds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "split" not in line:
            line["phases"] = {"forward": 0.1 * line["iteration"], "gradient_sync": 0.03}
    lines[0]["memory_bytes"] = [(1 << 30) + rank for rank in range(ranks)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / "events.jsonl").open("a") as events:
        for seconds in (2.0, 4.0, 3.0):
            events.write(json.dumps({"event": "checkpoint_saved", "iteration": 2, "pause_seconds": seconds}) + "\n")
    return folder


def test_the_phases_that_a_run_has_recorded(tmp_path: Path) -> None:
    """Without the first step's, which pays for the start; what comes between steps stands beside them."""
    folder = with_own_figures(a_run(tmp_path / "a-1", [7.0, 6.0, 5.0, 4.0]), 2)
    found = {chart.name: chart for chart in charts([of_run(folder)])}
    assert found["phases"].caption == "Median over the steps of rank 0. The phases of a step add up to its time."
    assert _phase_medians(of_run(folder)) == {"forward": pytest.approx(0.3), "gradient sync": 0.03}
    assert of_run(folder).occasions == {"checkpoint": [2.0, 4.0, 3.0]}
    assert found["between-steps"].caption == "Median time for which training paused, not part of the step time."


def test_every_ranks_memory(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a-1", [7.0, 6.0])
    assert of_run(folder).memory == {}
    assert of_run(with_own_figures(folder, 2)).memory == {0: 1 << 30, 1: (1 << 30) + 1}
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "run_finished", "peak_memory_by_rank": [5, 7]}) + "\n")
    assert of_run(folder).memory == {0: 5, 1: 7}


@pytest.mark.parametrize(("ranks", "axis"), [(64, "GiB"), (65, "rank")])
def test_more_ranks_than_bars_are_a_curve(tmp_path: Path, ranks: int, axis: str) -> None:
    folder = with_own_figures(a_run(tmp_path / "a-1", [7.0, 6.0]), ranks)
    (memory,) = [chart for chart in charts([of_run(folder)]) if chart.name == "memory"]
    assert f">{axis}</text>" in memory.svg
    assert (">rank 63</text>" in memory.svg) == (ranks == 64)


def test_the_title_of_many_runs_names_the_first(tmp_path: Path) -> None:
    subject = of_run(a_run(tmp_path / "first", [3.0, 2.0]))
    assert "<h1>first and first</h1>" in page([subject] * 2, [])
    assert "<h1>first and 4 others</h1>" in page([subject] * 5, [])


def test_the_layout_of_many_ranks_is_a_bitmap_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = of_run(a_run(tmp_path / "a-1", [7.0]))
    assert outline(page([subject], [])).loaded == ["data:,"]
    monkeypatch.setattr("tridock.report.page._DRAWN_RANKS", 1)
    _, picture = outline(page([subject], [])).loaded
    content = base64.b64decode(picture.removeprefix("data:image/png;base64,"), validate=True)
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"


HOSTILE = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>$\\frac{}$_&\x00\x1b[31m'


def test_hostile_names_and_values_stay_text(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "<b>a-1 $x_{", [7.0, 6.0])
    (folder / "manifest.json").write_text(json.dumps({HOSTILE: HOSTILE, "seed": {"a\ud800": ["</table>"]}}))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": HOSTILE, "event": HOSTILE, "reason": HOSTILE, HOSTILE: {"x": HOSTILE}}) + "\n")
    plan = json.loads((folder / "plan.json").read_text())
    plan["ranks"][0]["node"] = "</svg><script>x</script>$\\bad"
    plan["layout"] = HOSTILE
    (folder / "plan.json").write_text(json.dumps(plan))
    log = tmp_path / '_<script>"$\\frac.log'
    argument = f"  {'a' * 9} {'.' * 20} {HOSTILE}\n".replace("\x00", "")
    log.write_text(argument + logs.today(10, 7.5) + logs.TIMES.replace("optimizer", "opt-<i>"))
    found = read([folder], [log], drawn=True)
    assert found.tags.isdisjoint({"script", "b", "i"})
    assert "Step time by phase" in found.titles
    assert "\x00" not in "".join(found.text)
    assert any("<script>alert(1)</script>" in text for text in found.text)


@pytest.mark.parametrize(
    "losses", [[], [7.0], [None], [None, None, None], [7.0, None, 5.0], [1e30, 1e-30, -1.0], [0.0] * 3]
)
def test_few_points_and_losses_that_are_no_numbers(tmp_path: Path, losses: list[float | None]) -> None:
    subject = of_run(a_run(tmp_path / "a-1", losses))
    first = next(charts([subject]))
    assert (first.title == "Loss") == bool(losses)
    assert ("training: not finite" in first.svg) == (None in losses)
    assert ["state", "finished"] in outline(page([subject], [first])).rows


def test_a_run_that_has_logged_nothing_yet(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a-1", [], events=({"event": "run_started"},))
    for name in ("metrics.jsonl", "plan.json", "manifest.json"):
        (folder / name).unlink()
    path, *pictures = write_report([folder], [], tmp_path / "r.html")
    found = outline(path.read_text())
    assert pictures == []
    assert "Nothing is logged yet." in found.text
    assert any(text.endswith("Still running: a-1.") for text in found.text)


def test_files_that_are_half_written_or_of_another_kind(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a-1", [7.0, 6.0])
    (folder / "plan.json").write_text('{"ranks": [{"rank": "x"}], "memory": [], "cost": {"estimate": 5}, "layout": "l"')
    (folder / "manifest.json").write_text("[1]")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": "x", "loss": 1}\n{"loss": 1}\n[1]\n{"iteration": 3, "lo')
    assert ["last loss", "6.0000"] in read([folder]).rows


def test_of_many_points_few_are_drawn(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(logs.v115(number, 7.0 + (number == 1777) * 5) for number in range(1, 5001)))
    loss = next(charts(of_log(log)))
    assert len(loss.svg) < 60_000
    assert "the lowest and the highest value" in loss.caption


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = a_run(tmp_path / "a-1", []), tmp_path / "r.html"
    assert main(["report", str(run), "-o", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"page        {output}", f"chart       {tmp_path}/r-memory.png"]
    assert all(Path(line.split()[1]).is_file() for line in lines)


def test_arguments_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = "give runs/<run-id>, a Megatron log with --log, or a cluster with --hosts"
    several = "-o: is required for several runs, and for logs; name the HTML page: -o report.html\n"
    for arguments, message in (
        ((), f"--run: is missing; {missing}\n"),
        (("a", "b"), several),
        (("--log", "x"), several),
        (("a", "-o", "r.html", "--png", "x.png"), "--png: does not go with -o; got x.png; "
         "leave it out: the page's charts are written beside it as <page>-loss.png and so on\n"),
        (("-o", "r.txt"), "r.txt: a report is an HTML page; got .txt; end the file's name in .html\n"
         f"--run: is missing; {missing}\n"),
        (("-o", "r", "nowhere"), "r: a report is an HTML page; got no suffix; end the file's name in .html\n"
         "nowhere: is not a run's folder; got no such folder; give runs/<run-id>\n"),
    ):  # fmt: skip
        assert main(["report", *arguments]) == 2
        assert capsys.readouterr().err == message


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "r.html"
    with pytest.raises(RequestError) as caught:
        write_report([a_run(tmp_path / "a-1", [])], [], output)
    todo = "free some space there, or name a writable folder"
    assert str(caught.value) == f"{output}: cannot be written; got File exists; {todo}"


def test_samples_of_text_are_on_the_page_the_last_ones_open(tmp_path: Path) -> None:
    shown = [{"prompt": "def f(x):", "text": "\n    return <b>x</b>"}]
    events = tuple({"event": "samples", "iteration": it, "samples": shown, "seconds": 0.5} for it in (50, 100))
    html = page([of_run(a_run(tmp_path / "a", [3.0], events=events))], [])
    outline = Outline(html)
    assert "b" not in outline.tags
    assert outline.rows.count(["def f(x):", "\n    return <b>x</b>"]) == 2
    assert re.findall(r"<details( open)?><summary>After iteration (\d+)", html) == [(" open", "100"), ("", "50")]
    assert ["iteration: 50, seconds: 0.5"] in [row[-1:] for row in outline.rows]
