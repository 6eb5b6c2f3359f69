"""`tridock plan --search` and `--why` as a user types them: layouts that fit, their order, and the reasons."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plan_command import JEAN_ZAY, V100, document, refused
from tridock.cli import main
from tridock.experiment import load_experiment
from tridock.gpus import GPUS
from tridock.plan import Assumptions, assess


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("COLUMNS", "100")


WHY = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--why")


def test_why_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *WHY)
    assert (found["verdict"], found["problems"]) == ("tight", [])
    layout, others = found["why"]["layout"], found["why"]["others"]
    assert (layout["layout"], layout["set"]) == ("TP4 PP4 DP1 MB1", [])
    assert sum(layout["time"].values()) == pytest.approx(layout["seconds"])
    assert sum(layout["memory"].values()) == pytest.approx(layout["total_gib"], abs=0.001)
    (halved,) = (one for one in others if one["set"] == ["parallel.tensor_model_parallel_size=2"])
    assert halved["verdict"] == "no-fit"
    assert next(iter(halved["memory_difference"])) == "optimizer states"
    assert sum(halved["time_difference"].values()) == pytest.approx(halved["seconds"] - layout["seconds"])
    assert main(["plan", *WHY]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("TP4 PP4 DP1 MB1: tight: over 80 % · 10.1 to 15.8 GiB per rank · about ")
    for part in ("Time of an iteration", "Memory of a rank of stage 0, the fullest", "tensor_model_parallel_size=2",
                 "does not fit", "time: bubble +", "memory: optimizer states +5.6", "12 bytes a parameter",
                 "NCCL: fixed overhead", "pipeline 4 between nodes"):  # fmt: skip
        assert part in text, part


def test_two_layouts_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *WHY, "TP4 PP4 VPP3", "TP4 PP4 DP1 MB2")
    assert [found["why"]["layout"]["layout"], *(one["layout"] for one in found["why"]["others"])] == [
        "TP4 PP4 VPP3 DP1 MB1", "TP4 PP4 DP1 MB2",
    ]  # fmt: skip
    assert found["why"]["others"][0]["time_difference"]["bubble"] > 0
    assert main(["plan", *WHY, "TP4 PP4 MB2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("A TP4 PP4 DP1 MB1: tight: over 80 % · 10.1 to 15.8 GiB per rank · about ")
    assert lines[1].startswith("B TP4 PP4 DP1 MB2: tight")
    assert "A B B - A" in lines
    assert len([line for line in lines if line.startswith("total ")]) == 2


def test_why_an_illegal_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Its neighbors show what would run."""
    arguments = (*WHY[:-1], "--set", "parallel.pipeline_model_parallel_size=8", "--set",
                 "parallel.tensor_model_parallel_size=2", "--why")  # fmt: skip
    found = document(capsys, *arguments, code=2)
    message = "parallel.pipeline_model_parallel_size: must divide num_layers 36; got 8; use 6 or 9, or num_layers 40"
    assert [problem["message"] for problem in found["problems"]] == [message]
    assert found["why"]["others"]
    assert main(["plan", *arguments]) == 2
    done = capsys.readouterr()
    assert done.out.startswith("TP2 PP8 DP1 MB1: cannot run")
    assert done.err == f"{WHY[0]}: {message}\n"


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (("TP4", "TP2", "TP1"), "--why: takes at most two layouts; got 3; leave some out"),
        (("TP4", "--search"), "--search: has no effect with --why; leave one of the two out"),
        (("TP4", "--plot", "a.svg"), "--plot: has no effect with --why; leave one of the two out"),
        (
            ("TP4", "--cost-per-gpu-hour", "2"),
            "--cost-per-gpu-hour: has no effect with --why; leave one of the two out",
        ),
        (
            ("TP4 DP8",),
            "--why: follows from the slots: it is DP1 with the other sizes; got TP4 DP8; leave DP out",
        ),
    ],
)
def test_wrong_layouts(layouts: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *WHY, *layouts) == f"{message}\n"
    assert document(capsys, *WHY, *layouts, code=2)["problems"][0]["message"] == message


# ---- the search ------------------------------------------------------------------------------------------------------


def test_a_search_says_how_far_it_is_unless_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tridock.progress.LINE_S", -1.0)
    argv = ["plan", "--config", "configs/demo-3d.yaml", "--nodes", "1", "--gpus-per-node", "4", "--gpu", "v100-32gb"]
    assert main([*argv, "--search"]) == 0
    *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"search: (\d+) of \1 layouts after \d+ s", last)
    assert main([*argv, "--search", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_search_lists_the_fastest_first_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--search")
    found = document(capsys, *arguments)
    seconds = [one["seconds"] for one in found["found"]]
    order = [(one["verdict"] != "fits", one["seconds"]) for one in found["found"]]
    assert order == sorted(order)
    assert seconds
    assert found["network"] == "assumed: 4 x 25 Gbit/s, as 100 Gbit/s for 4 GPUs"
    assert all(one["verdict"] in ("fits", "tight") and one["total_gib"] <= 15.8 for one in found["found"])
    reasons = {one["reason"] for one in found["rejected"]}
    assert "does not fit the GPU's memory" in reasons
    assert "parallel.pipeline_model_parallel_size must divide num_layers 36" in reasons
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "TP4 PP4 VPP9 DP1" in text
    assert "network: 100 Gbit/s per node (assumed: 4 x 25 Gbit/s, as 100 Gbit/s for 4 GPUs)" in " ".join(text.split())
    assert "Best layout: --set " in text


def test_the_front_of_memory_and_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "front.svg"
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--search", "--plot", str(picture))
    found = document(capsys, *arguments)["found"]
    places = [(one["seconds"], round(10 * one["total_gib"])) for one in found]  # as it is shown
    for one, (time, memory) in zip(found, places, strict=True):
        beaten = any(
            other_time <= time and other_memory <= memory and (other_time, other_memory) != (time, memory)
            for other_time, other_memory in places
        )
        assert not (one["pareto"] and beaten)
        assert one["pareto"] or beaten or places.count((time, memory)) > 1
    front = [one for one in found if one["pareto"]]
    assert len(front) > 1
    assert "no other is faster with less" in picture.read_text()
    assert main(["plan", *arguments]) == 0
    shown = capsys.readouterr().out.partition("Memory against time: no other layout is faster with less")[2]
    fastest = min(range(len(found)), key=lambda number: found[number]["seconds"])
    rows = [line.split() for line in shown.splitlines() if line.rstrip().endswith("%")]
    assert len(rows) == min(len(front), 12)
    assert rows[0][0] == str(fastest + 1)


def test_the_best_layouts_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--search", "--tokens", "1e9")
    best = document(capsys, *arguments)["found"][0]
    hours = 16 * 1e9 / best["tokens_per_second"] / 3600
    assert (best["gpu_hours"], best["cost"]) == (pytest.approx(hours), None)
    asked = (*arguments, "--cost-per-gpu-hour", "2", "--node-mtbf", "6300", "--checkpoint-gb-s", "1")
    assert document(capsys, *asked)["found"][0]["cost"] == pytest.approx(2 * hours)
    for illegal in ((), ("--set", "parallel.tensor_model_parallel_size=3")):  # the search looks for one that runs
        assert main(["plan", *asked, *illegal]) == 0
        shown = capsys.readouterr().out.partition("Best layout:")[2]
        assert f"{hours:,.1f} GPU hours, which cost {2 * hours:,.2f} at 2 each" in shown
        assert "goodput 99." in shown


def write(path: Path, fields: dict[str, Any]) -> None:
    base = {"name": "e", "data": {"data_path": "data/x"}, "train": {"train_iters": 3}}
    path.write_text(yaml.safe_dump({**base, **fields}))


def searched(capsys: pytest.CaptureFixture[str], path: Path, fields: dict[str, Any], *options: str) -> list[set[str]]:
    """The options of every layout that was found, the best first."""
    write(path, fields)
    return [set(one["set"]) for one in document(capsys, str(path), "--search", *options)["found"]]


WIDE = {"num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000}


def test_a_search_recomputes_as_few_layers_as_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = {
        "engine": "megatron-core",
        "precision": "bf16",
        "model": {**WIDE, "seq_length": 4096},
        "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    }
    options = ("--nodes", "1", "--gpus-per-node", "1", "--gpu", "48gib", "--tflops", "100")
    found = searched(capsys, tmp_path / "e.yaml", fields, *options)
    blocks = [one for one in found if "model.recompute_method=block" in one]
    (least,) = (one for one in blocks if "batch.micro_batch_size=2" in one)
    (word,) = (word for word in least if word.startswith("model.recompute_num_layers="))
    count = int(word.partition("=")[2])

    def verdict(layers: int) -> str:
        options_of = {*(least - {word}), f"model.recompute_num_layers={layers}"}
        words = [part for option in sorted(options_of) for part in ("--set", option)]
        return str(document(capsys, str(tmp_path / "e.yaml"), *options, *words)["verdict"])

    assert 1 < count < 8
    assert [verdict(layers) for layers in (count - 1, count)] == ["tight", "fits"]
    assert all("batch.micro_batch_size" in " ".join(one) for one in blocks)  # a micro batch of 1 fits without


def test_a_search_has_each_layout_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With one micro batch, gradients are reduced once either way."""
    fields = {
        "parallel": {"strategy": "fsdp"},
        "model": {**WIDE, "seq_length": 128},
        "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    }
    found = searched(capsys, tmp_path / "e.yaml", fields, "--nodes", "1", "--gpu", "h100")
    twice = {"parallel.reduce_gradients_once=true"}
    once = [one for one in found if twice <= one]
    assert once
    assert set() in found
    assert twice not in found
    assert {"parallel.tensor_model_parallel_size=8", *twice} not in found


LLAMA = {"engine": "megatron-core", "precision": "bf16", "batch": {"micro_batch_size": 1, "global_batch_size": 64}}
PIPELINE = "parallel.pipeline_model_parallel_size=4"


def test_a_search_relieves_the_last_stage_of_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Llama 3's output layer takes as long as two to three of the 8B model's layers: it has 32."""
    fields = {**LLAMA, "model": {"preset": "llama-3.1-8b", "seq_length": 8192}}
    write(tmp_path / "e.yaml", fields)
    arguments = (str(tmp_path / "e.yaml"), "--nodes", "1", "--gpus-per-node", "4", "--gpu", "h200", "--search")
    times = {frozenset(one["set"]): one["seconds"] for one in document(capsys, *arguments)["found"]}
    own = {f"parallel.decoder_{which}_pipeline_num_layers=7" for which in ("first", "last")}
    pairs = [(times[one], times[one - own]) for one in times if {PIPELINE, *own} <= one and one - own in times]
    assert all(unequal < equal for unequal, equal in pairs)
    assert any(unequal < 0.95 * equal for unequal, equal in pairs)


def test_a_search_finds_stages_for_layers_that_do_not_divide(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As Llama 3's 405B: 126 layers on 16 stages, one less on the first and the last. Here 14 layers on 4."""
    fields = {**LLAMA, "model": {**WIDE, "num_layers": 14, "seq_length": 2048, "vocab_size": 1000}}
    found = searched(capsys, tmp_path / "e.yaml", fields, "--nodes", "1", "--gpu", "h100")
    own = {f"parallel.decoder_{which}_pipeline_num_layers=3" for which in ("first", "last")}
    assert any({PIPELINE, *own} <= one for one in found)
    assert all("parallel.decoder_" in " ".join(one) for one in found if PIPELINE in one)


def test_a_search_splits_long_samples_over_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = {"engine": "megatron-core", "precision": "bf16", "batch": {"micro_batch_size": 1, "global_batch_size": 8}}
    options = ("--nodes", "1", "--gpu", "h100")

    def tried(length: int) -> set[str]:
        found = searched(capsys, tmp_path / "e.yaml", {**fields, "model": {**WIDE, "seq_length": length}}, *options)
        return {word for one in found for word in one if word.startswith("parallel.context_parallel_size")}

    assert tried(2048) == set()
    assert tried(8192) == {f"parallel.context_parallel_size={size}" for size in (2, 4)}


def test_the_set_options_of_a_found_layout_select_it(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("model", "micro", "change"),
    [
        ({"preset": "gpt3-13b", "seq_length": 2048}, 1, "deepspeed={"),
        ({**WIDE, "seq_length": 2048}, 8, "batch.global_batch_size=32"),  # not given: it was that of another layout
    ],
)
def test_the_best_layouts_options_can_be_pasted(
    model: dict[str, Any], micro: int, change: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a run.yaml"
    write(path, {"model": model, "batch": {"micro_batch_size": micro}})
    arguments = (str(path), "--nodes", "1", "--gpus-per-node", "4", "--gpu", "a100-40gb")
    best = document(capsys, *arguments, "--search")["found"][0]
    assert any(one.startswith(change) for one in best["set"])
    assert main(["plan", *arguments, "--search"]) == 0
    (options,) = re.findall(r"^Best layout: (.*)$", capsys.readouterr().out, re.MULTILINE)
    found = document(capsys, *arguments, *shlex.split(options))
    assert (found["verdict"], found["global_batch_size"]) == (best["verdict"], 4 * micro)
    assert found["cost"]["estimate"]["iteration"] == pytest.approx(best["seconds"])
    assert max(stage["total_gib"] for stage in found["memory"]["stages"]) == pytest.approx(best["total_gib"], abs=1e-3)


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
    found = document(capsys, *arguments, code=2)
    message = (
        f"{arguments[0]}: none of {len(found['rejected']):,} layouts works; use more GPUs, GPUs with more memory, or"
    )
    message += " a smaller model"
    assert found["found"] == []
    assert found["problems"] == [{"field": arguments[0], "message": message, "nearest": []}]
    assert main(["plan", *arguments]) == 2
    done = capsys.readouterr()
    assert "others do not work:" in done.out
    assert done.err == f"{message}\n"


def test_nothing_works_for_another_reason_than_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = {"engine": "megatron-core", "model": {**WIDE, "seq_length": 128, "num_moe_experts": 8}}
    write(tmp_path / "e.yaml", {**fields, "precision": "bf16", "batch": {"micro_batch_size": 1}})
    found = document(capsys, str(tmp_path / "e.yaml"), "--search", "--nodes", "1", "--gpu", "h100", code=2)
    reason = "correct the experiment: model.add_bias_linear megatron-core does not train experts with biases"
    assert found["problems"][0]["message"].endswith(f"layouts works; {reason}")


# ---- the user's own program ----


def test_states_go_to_the_host_only_where_nothing_fits_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "big.yaml"
    fields = {"name": "big", "model": {"preset": "gpt3-13b", "seq_length": 2048}, "train": {"train_iters": 10}}
    fields |= {"batch": {"micro_batch_size": 1, "global_batch_size": 16}, "data": {"data_path": "data/x"}}
    file.write_text(yaml.safe_dump(fields))
    large, small = ((str(file), "--nodes", "1", "--gpus-per-node", "4", "--gpu", gpu) for gpu in ("h200", "a100-40gb"))
    assert not [one for one in document(capsys, *large, "--search")["found"] if "deepspeed" in str(one["set"])]
    layouts = document(capsys, *small, "--search")["found"]
    assert layouts
    assert all("deepspeed" in str(one["set"]) for one in layouts)
    options = [word for override in layouts[0]["set"] for word in ("--set", override)]
    again = document(capsys, *small, *options)
    assert again["verdict"] == "fits"
    compared = document(capsys, *small, "--why", "ZeRO-3 op MB1", "ZeRO-3 MB1")["why"]
    assert compared["layout"]["layout"] == "TP1 PP1 DP4 MB1 ZeRO-3 op"
    assert (compared["layout"]["verdict"], compared["others"][0]["verdict"]) == ("fits", "no-fit")
    assert again["host_memory"]["node-0"]["least"] > 200e9
    assert main(["plan", *small, "--search"]) == 0
    text = capsys.readouterr().out
    assert "ZeRO-3 op" in text
    assert "nothing fits without offloading to the host: o, optimizer states; op, weights too" in text


@pytest.mark.full
def test_a_search_of_gpt_3_on_512_h100(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Megatron-LM trains 175B with TP8 PP8 there (README of NVIDIA/Megatron-LM). The network is not given."""
    fields = {
        "engine": "megatron-core",
        "precision": "bf16",
        "model": {"preset": "gpt3-175b", "seq_length": 2048},
        "batch": {"micro_batch_size": 1, "global_batch_size": 1536},
        "parallel": {"use_distributed_optimizer": True, "tensor_model_parallel_size": 8, "sequence_parallel": True},
    }
    write(tmp_path / "e.yaml", fields)
    options = ("--nodes", "64", "--gpus-per-node", "8", "--gpu", "h100", "--search")
    plan = document(capsys, str(tmp_path / "e.yaml"), *options)
    assert plan["network"] == "assumed: 8 x 400 Gbit/s, as DGX H100"
    fits = [one for one in plan["found"] if one["verdict"] == "fits"]
    known = next(one for one in fits if _split(one) == (8, 8))
    assert fits.index(known) < 5
    assert known["seconds"] < 1.02 * fits[0]["seconds"]


def _split(found: dict[str, Any]) -> tuple[int, int]:
    fields = found["fields"]
    return fields["parallel.tensor_model_parallel_size"], fields["parallel.pipeline_model_parallel_size"]
