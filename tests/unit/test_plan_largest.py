"""`tridock plan --largest` as a user types it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.plan_command import document, refused
from tridock.cli import main


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("COLUMNS", "100")


def test_the_largest_models(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("configs/demo.yaml", "--nodes", "1", "--gpu", "h100-80gb")
    found = document(capsys, *arguments, "--largest")["largest"]
    sizes = [one["parameters"] for one in found]
    assert sizes == sorted(sizes, reverse=True)
    by_name = {one["preset"]: one for one in found}
    assert by_name["llama-3.1-405b"]["reason"] == "does not fit the GPU's memory"
    assert by_name["qwen3-235b-a22b"]["reason"] == "model.num_moe_experts engine torch has no mixture of experts"
    fits = [one for one in found if one["verdict"] == "fits"]
    assert (len(fits), fits[0]["preset"]) == (3, "qwen2.5-72b")
    assert main(["plan", *arguments, "--largest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"{one['preset']} ") for line in lines) for one in found)
    assert lines[-1].startswith("Largest (fits): --set model.preset=qwen2.5-72b --set ")
    planned = document(capsys, *arguments, *shlex.split(lines[-1].partition(": ")[2]))
    assert planned["verdict"] == "fits"
    assert planned["cost"]["parameters"] == pytest.approx(fits[0]["parameters"], rel=1e-4)
    assert planned["cost"]["estimate"]["iteration"] == pytest.approx(fits[0]["seconds"])


def test_no_model_is_small_enough(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("configs/demo.yaml", "--nodes", "1", "--gpus-per-node", "1", "--gpu", "1gib", "--tflops", "9")
    todo = "use more GPUs, or GPUs with more memory"
    assert refused(capsys, *arguments, "--largest") == (
        f"configs/demo.yaml: trains the model of no preset here: does not fit the GPU's memory; {todo}\n"
    )
    assert document(capsys, *arguments, "--largest", code=2)["problems"]
    assert refused(capsys, *arguments, "--largest", "--why", "--search") == (
        "--search: has no effect with --why; leave one of the two out\n"
        "--largest: has no effect with --why; leave one of the two out\n"
    )
