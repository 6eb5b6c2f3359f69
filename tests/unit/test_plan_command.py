"""`tridock plan` as a user types it: what it prints, what its JSON holds, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tridock.cli import main
from tridock.experiment import load_experiment
from tridock.gpus import GPUS
from tridock.plan import Assumptions, assess

JEAN_ZAY = Path("configs/jean-zay")
V100 = ("--gpu", "v100-16gb", "--gpus-per-node", "4")


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("COLUMNS", "100")


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_the_seeds_7_5b_is_what_nvidia_smi_showed(capsys: pytest.CaptureFixture[str]) -> None:
    """14,659 MiB on the first of four nodes of V100-16GB, and it ran."""
    found = document(capsys, str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100)
    assert found["verdict"] == "tight"
    stages = found["memory"]["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1, 2, 3]
    assert stages[0]["total_gib"] == pytest.approx(14659 / 1024, rel=0.05)
    for stage in stages:
        assert stage["total_gib"] == pytest.approx(sum(term["gib"] for term in stage["terms"]), abs=0.001)
        assert all(term["source"] for term in stage["terms"])
    assert found["problems"] == []
    assert found["ranks"][5] == {
        "rank": 5, "node": "node-1", "slot": 1, "local_rank": 1, "pp": 1, "dp": 0, "cp": 0, "tp": 1,
    }  # fmt: skip
    assert found["groups"]["tensor"] == {"count": 4, "size": 4, "crossing": 0, "nodes": 1}
    assert found["cost"]["parameters"] == 7_459_397_632


def test_the_seeds_30b_barely_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """It ran for 60 steps, and then out of memory."""
    found = document(capsys, str(JEAN_ZAY / "30b.yaml"), "--nodes", "16", *V100)
    assert found["verdict"] == "tight"
    assert max(stage["share"] for stage in found["memory"]["stages"]) > 0.95


def test_the_seeds_76b_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "76b-as-written.yaml"), "--nodes", "32", *V100)
    found = document(capsys, *arguments, code=2)
    message = "must divide num_layers 60; got 32; use 30 or 60, or num_layers 64"
    assert found["verdict"] == "illegal"
    assert found["problems"] == [
        {
            "field": "parallel.pipeline_model_parallel_size",
            "message": f"parallel.pipeline_model_parallel_size: {message}",
            "nearest": [30, 60],
        }
    ]
    assert (found["ranks"], found["memory"]["stages"], found["cost"]) == ([], [], None)
    assert refused(capsys, *arguments) == f"{arguments[0]}: parallel.pipeline_model_parallel_size: {message}\n"


def test_a_v100_has_no_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(JEAN_ZAY / "7.5b.yaml")
    what = "a v100-16gb has no bf16: its compute capability is below 8.0"
    message = f"{config}: precision: {what}; got bf16; use fp16 or fp32\n"
    assert refused(capsys, config, "--nodes", "4", *V100, "--set", "precision=bf16") == message


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(JEAN_ZAY / "7.5b.yaml")
    arguments = (config, "--nodes", "4", "--gpus-per-node", "4", "--gpu", "8gib")
    assert document(capsys, *arguments, code=2)["verdict"] == "no-fit"
    assert main(["plan", *arguments]) == 2
    done = capsys.readouterr()
    assert done.err == (
        f"{config}: a rank of stage 0 needs more memory than the 8.0 GiB of a 8gib; got 10.0 GiB; "
        "see `tridock plan --search` for layouts that fit, or start it all the same with --force\n"
    )
    assert "does not fit" in done.out
    assert "not estimated: the GPU is unknown" in done.out


def test_without_a_gpu_memory_is_shown_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "configs/demo.yaml", "--hosts", "hostfiles/twin", "--offline")
    assert (found["verdict"], found["memory"]["limit_gib"]) == ("fits", None)
    assert found["memory"]["stages"][0]["total_gib"] > 0
    assert found["cost"]["estimate"] is None
    assert any("no GPU is named" in note for note in found["notes"])


def test_the_gpu_and_the_network_stand_beside_the_hostfile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("".join(f"gpu-{number} slots=4\n" for number in range(4)))
    (tmp_path / "lab.yaml").write_text("gpu: v100-32gb\nnetwork_gbit: 200\n")
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--hosts", str(tmp_path / "lab"))
    found = document(capsys, *arguments)
    assert (found["verdict"], found["memory"]["gpu"]) == ("fits", "v100-32gb")
    assert found["cost"]["rates"]["network_gb_s"] == 25.0
    # What the user says wins.
    assert document(capsys, *arguments, "--gpu", "v100-16gb")["verdict"] == "tight"


def test_an_experiment_that_cannot_be_read_has_its_json_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("name: a\nmodel: {num_layers: 0}\n")
    found = document(capsys, str(tmp_path / "e.yaml"), "--nodes", "1", code=2)
    assert found["verdict"] == "illegal"
    fields = [problem["field"] for problem in found["problems"]]
    assert f"{tmp_path}/e.yaml: model.num_layers" in fields
    assert len(fields) > 3


def test_what_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--tokens", "300e9"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "tight: over 80 % · TP4 PP4 DP1 · 16 ranks · 14.34 GiB per rank of 15.8 (v100-16gb) · about "
    )
    for part in ("stage 3", "optimizer states", "12 bytes a parameter", "fixed overhead", "pipeline bubble  42.9%",
                  "2.0.0.3", "between nodes", "300.0 B tokens take about "):  # fmt: skip
        assert part in text, part


def test_tensor_parallel_groups_over_nodes_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "8", "--gpus-per-node", "2", "--gpu", "v100-16gb")
    found = document(capsys, *arguments)
    assert found["groups"]["tensor"]["crossing"] == 4
    assert any("parallel.tensor_model_parallel_size" in warning for warning in found["warnings"])
    main(["plan", *arguments])
    assert "warning: parallel.tensor_model_parallel_size" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / f"map.{suffix}"
    assert main(["plan", "configs/demo.yaml", "--hosts", "hostfiles/twin", "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("configs/demo.yaml",),
            "--hosts: or --nodes says what the cluster is; give a DeepSpeed hostfile, or a number of --nodes",
        ),
        (
            ("configs/demo.yaml", "--hosts", "hostfiles/twin", "--nodes", "2"),
            "--hosts: or --nodes says what the cluster is; got both; give a DeepSpeed hostfile, or a number of --nodes",
        ),
        (("configs/demo.yaml", "--nodes", "0"), "--nodes: must be at least 1; got 0; give a number"),
        (
            ("configs/demo.yaml", "--nodes", "1", "--gpus-per-node", "-1"),
            "--gpus-per-node: must be at least 1; got -1; give a number",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--search"),
            "configs/demo.yaml: a search needs to know the GPU; give --gpu (with its memory alone, also --tflops), "
            "or gpu: in the settings beside the hostfile",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--tflops", "0", "--tokens", "nan", "--network-gbit", "-1"),
            "--network-gbit: must be a number above 0; got -1; give one, as in 300e9\n"
            "--tflops: must be a number above 0; got 0; give one, as in 300e9\n"
            "--tokens: must be a number above 0; got nan; give one, as in 300e9",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--plot", "map.pdf"),
            "map.pdf: the rank map is drawn as PNG or SVG; got .pdf; end the file's name in .png or .svg",
        ),
    ],
)
def test_wrong_words(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments) == f"{message}\n"


def test_an_unknown_gpu_beside_the_hostfile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=4\n")
    (tmp_path / "lab.yaml").write_text("gpu: v200\n")
    text = refused(capsys, "configs/demo.yaml", "--hosts", str(tmp_path / "lab"))
    assert text.startswith(f"{tmp_path}/lab.yaml: gpu: is not a known GPU; got 'v200'; use one of ")


def test_one_field_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "parallel.zero_stage"]) == 0
    assert capsys.readouterr().out.startswith("parallel.zero_stage (experiment)\n")


# ---- the search ------------------------------------------------------------------------------------------------------


def test_a_search_lists_the_fastest_first_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--search")
    found = document(capsys, *arguments)
    seconds = [one["seconds"] for one in found["found"]]
    assert seconds == sorted(seconds)
    assert seconds
    assert all(one["verdict"] in ("fits", "tight") and one["total_gib"] <= 15.8 for one in found["found"])
    reasons = {one["reason"] for one in found["rejected"]}
    assert "does not fit the GPU's memory" in reasons
    assert "parallel.pipeline_model_parallel_size must divide num_layers 36" in reasons
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "TP4 PP4 DP1" in text
    assert "Best layout: --set " in text


def test_the_words_of_a_layout_that_was_found_ask_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = JEAN_ZAY / "7.5b.yaml"
    found = document(capsys, str(config), "--nodes", "4", "--gpu", "a100-80gb", "--gpus-per-node", "4", "--search")
    slots = {f"node-{number}": range(4) for number in range(4)}
    for one in found["found"][::17]:
        assessment = assess(load_experiment(config, one["set"]), slots, "e", Assumptions(GPUS["a100-80gb"]))
        assert assessment.verdict == one["verdict"]
        assert assessment.worst.total_bytes / 2**30 == pytest.approx(one["total_gib"], abs=1e-4)
        assert assessment.cost is not None
        assert assessment.cost.estimate is not None
        assert assessment.cost.estimate.iteration == pytest.approx(one["seconds"])


def test_a_search_wraps_layouts_and_cuts_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "73")
    assert main(["plan", str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--search"]) == 0
    shown = capsys.readouterr().out.partition("mb: micro batch")[0]
    assert "…" not in shown
    rows = [line for line in shown.splitlines() if line.rstrip().endswith("%")]
    assert len(rows) == 12


def test_a_search_counts_images_of_a_model_of_those(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "configs/resnet50.yaml",
        "--nodes",
        "1",
        "--gpus-per-node",
        "8",
        "--gpu",
        "h100-80gb",
        "--tflops",
        "200",
    )
    assert main(["plan", *arguments, "--search"]) == 0
    text = capsys.readouterr().out
    assert "images/s" in text
    assert "tokens" not in text


@pytest.mark.parametrize("config", ["configs/megatron/gpt2-10b.yaml", "configs/demo.yaml"])
def test_a_search_of_the_other_engines(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, config, "--nodes", "2", "--gpu", "a100-40gb", "--search")
    assert found["found"]
    stages = {one["fields"].get("parallel.zero_stage") for one in found["found"]}
    assert {0, 1, 2, 3} & stages


def test_a_search_by_memory_and_rate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        str(JEAN_ZAY / "7.5b.yaml"),
        "--nodes",
        "4",
        "--gpus-per-node",
        "4",
        "--gpu",
        "24gib",
        "--tflops",
        "50",
    )
    found = document(capsys, *arguments, "--search")["found"]
    assert found
    assert all(one["seconds"] > 0 and one["mfu"] is None for one in found)


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "76b.yaml"), "--nodes", "1", "--gpu", "t4", "--search")
    assert document(capsys, *arguments, code=2)["found"] == []
    assert main(["plan", *arguments]) == 2
    assert "others do not work:" in capsys.readouterr().out
