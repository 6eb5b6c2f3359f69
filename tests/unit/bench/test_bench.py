"""A benchmark's matrix, its figures, and what is written of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tridock.bench.cells import Bench, Cell, Measured, cells_of, exit_code_of, load_bench, scaling
from tridock.bench.output import document, markdown, plots_of, record, row
from tridock.bench.run import run_bench
from tridock.cli import main
from tridock.engines.fields import as_overrides
from tridock.errors import RequestError
from tridock.experiment import load_experiment

ROOT = Path(__file__).parents[3]
SMALL = Bench(
    experiment="e.yaml",
    set={"model.num_layers": 2},
    axes={
        "strategy": {"ddp": {"parallel.strategy": "ddp"}, "fsdp": {"parallel.strategy": "fsdp"}},
        "size": {"one": {"model.num_layers": 1}, "two": {}},
    },
    world=(1, 2),
)


def of(world: int, *steps: float, strategy: str = "ddp", tokens: int = 100, **more: object) -> Measured:
    return Measured(Cell({"strategy": strategy}, world, {}), "ok", step_s=steps, tokens_per_step=tokens, **more)  # type: ignore[arg-type]


def test_every_product_is_a_cell() -> None:
    cells = list(cells_of(SMALL))
    assert [cell.name for cell in cells] == [
        f"{strategy} · {size} · {ranks}"
        for strategy in ("ddp", "fsdp")
        for size in ("one", "two")
        for ranks in ("1 rank", "2 ranks")
    ]
    assert cells[0].fields == {"model.num_layers": 1, "parallel.strategy": "ddp"}
    assert cells[2].fields == {"model.num_layers": 2, "parallel.strategy": "ddp"}


def test_overrides() -> None:
    fields = {"a.b": None, "c": True, "d": 1.5, "e": "x"}
    assert as_overrides(fields) == ["a.b=null", "c=true", "d=1.5", "e=x"]


def test_figures() -> None:
    measured = of(2, 0.5, 0.4, 0.6)
    assert measured.median_s == 0.5
    assert measured.tokens_per_second == 200.0
    assert measured.spread == pytest.approx(0.4)
    assert measured.overhead is None


def test_the_overhead_is_that_of_the_median_turn() -> None:
    few = of(1, 0.5, over_bare=(1.0, 1.02, 3.0))
    assert few.overhead == pytest.approx(0.02)
    assert few.overhead_error is None
    assert row(few, [few])[-1] == "+2.0%"
    # Of a normal distribution: the error of the median is 1.2533 of the mean's.
    turns = tuple(statistics.NormalDist(0.99, 0.05).inv_cdf((place + 0.5) / 1000) for place in range(1000))
    many = of(1, 0.5, over_bare=turns)
    assert many.overhead_error == pytest.approx(1.2533 * 0.05 / 1000**0.5, rel=0.01)
    assert row(many, [many])[-1] == "-1.0% ±0.2%"


@pytest.mark.parametrize(("states", "code"), [(["failed", "ok"], 0), (["refused", "failed"], 4), (["refused"], 2)])
def test_a_benchmark_that_measured_nothing_has_failed(states: list[str], code: int) -> None:
    assert exit_code_of([Measured(Cell({}, 1, {}), state) for state in states]) == code


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("experiment: e.yaml\nworld: [1, 2]\n")
    assert load_bench(path).world == (1, 2)
    assert load_bench(path, [4, 8]).world == (4, 8)
    with pytest.raises(RequestError, match=r"world\.0: .*greater than 0; got 0"):
        load_bench(path, [0])


def test_an_experiment_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.yaml").write_text("experiment: none.yaml\n")
    assert main(["bench", str(tmp_path / "b.yaml"), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "none.yaml: cannot be read as an experiment; got no such file; give the path of an experiment file\n"
    )
    assert not (tmp_path / "out").exists()


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    bench = Bench.model_validate({"experiment": str(ROOT / "configs" / "demo.yaml"), "world": [2]})
    said: list[str] = []
    (cell,) = run_bench(bench, tmp_path, None, 1, said.append)
    assert (cell.state, cell.reason) == (
        "refused",
        "world: each rank needs its own GPU; got 2; this machine has 1",
    )
    assert said[1] == f"  refused: {cell.reason}"


def test_scaling_is_beside_the_smallest_world_of_the_same_kind() -> None:
    alone, two = of(1, 1.0), of(2, 1.25, tokens=200)
    others = [alone, two, of(1, 0.1, strategy="fsdp")]
    assert scaling(alone, others) is None
    assert scaling(two, others) == pytest.approx(0.8)
    assert scaling(Measured(two.cell, "failed"), others) is None


def test_a_row_and_the_reasons() -> None:
    done = of(
        1,
        0.1,
        model_tflops_per_rank=1.25,
        mfu=0.5,
        peak_bytes=2**30,
        predicted_bytes=2**29,
        device="cpu",
        communication=0.125,
    )
    lost = Measured(Cell({"strategy": "tp3"}, 1, {}), "refused", "three do not divide four")
    assert row(done, [done]) == [
        "ddp · 1 rank", "100.0 ms", "0.0%", "1,000 tokens/s",
        "1.25", "50.0%", "1.00 GiB", "0.50 GiB", "-", "12.5%", "-",
    ]  # fmt: skip
    untold = of(2, 0.1, no_communication="no end after 5 s", no_bare="two models do not fit")
    assert row(untold, [untold])[-2] == "-"
    text = markdown([done, lost, untold])
    assert "\n- ddp · 2 ranks: communication: no end after 5 s\n" in text
    assert "\n- ddp · 2 ranks: over bare torch: two models do not fit\n" in text
    assert "| tp3 · 1 rank | refused |" in text
    assert "\n- tp3 · 1 rank: refused: three do not divide four\n" in text
    assert "\nOn cpu, python " in text


def test_what_is_written(tmp_path: Path) -> None:
    measured = [of(1, 0.1, 0.2, communication=0.0), Measured(Cell({"strategy": "x"}, 2, {}), "failed", "why")]
    record(measured, SMALL, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["version"] == 1
    assert [cell["state"] for cell in found["cells"]] == ["ok", "failed"]
    assert found["cells"][0]["median_s"] == pytest.approx(0.15)
    assert found["bench"]["experiment"] == "e.yaml"
    assert found == json.loads(json.dumps(document(measured, SMALL)))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"results.json", "results.md", "step.png", "speed.png", "communication.png"}


def test_every_figure_that_is_known_is_a_plot(tmp_path: Path) -> None:
    known = {"model_tflops_per_rank": 1.0, "mfu": 0.5, "peak_bytes": 2**30, "predicted_bytes": 2**29}
    measured = [of(1, 0.1, 0.2, **known), of(2, 0.1, communication=0.1), of(2, 0.1, strategy="fsdp")]
    record(measured, SMALL, tmp_path)
    plots = {path.stem for path in tmp_path.glob("*.png")}
    assert plots == {"step", "speed", "tflops", "mfu", "memory", "communication", "scaling"}
    title, unit, bars = plots_of(measured)["memory"]
    assert (title, unit) == ("peak memory of a rank", "GiB")
    assert [(bar.name, list(bar.values)) for bar in bars] == [
        ("measured", [1.0, None, None]),
        ("planned", [0.5, None, None]),
    ]
    step = plots_of(measured)["step"][2][0]
    assert step.values == pytest.approx([150.0, 100.0, 100.0])
    assert step.ranges[0] == pytest.approx((100.0, 200.0))
    assert plots_of(measured)["scaling"][2][0].values == [None, pytest.approx(75.0), None]


def test_nothing_done_has_no_plots(tmp_path: Path) -> None:
    record([Measured(Cell({}, 1, {}), "failed", "why")], SMALL, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md"}


def test_all_that_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("experimnt: a\nworld: [0]\nrepeats: 1.5\n")
    with pytest.raises(RequestError) as caught:
        load_bench(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert any("did you mean experiment" in line for line in lines)


@pytest.mark.parametrize("name", ["small", "h200", "engines"])
def test_shipped_benchmarks_are_sound(name: str) -> None:
    path = ROOT / "configs" / "bench" / f"{name}.yaml"
    bench = load_bench(path)
    for cell in cells_of(bench):
        load_experiment(path.parent / bench.experiment, as_overrides(cell.fields))
