"""`tridock plan` as a user types it: what it prints, what its JSON holds, how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan_command import JEAN_ZAY, V100, document, refused
from tests.unit.plan.test_from_run import write_run
from tridock.cli import main
from tridock.cluster.settings import Cluster


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("COLUMNS", "100")


def test_the_seeds_7_5b_is_tight_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """14,659 of 16,160 MiB on the first of four nodes, and it ran; its Megatron kept two bytes a parameter more."""
    found = document(capsys, str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100)
    assert found["verdict"] == "tight"
    stages = found["memory"]["stages"]
    assert [stage["stage"] for stage in stages] == [0, 1, 2, 3]
    assert stages[0]["total_gib"] == pytest.approx(14659 / 1024 - 2 * 0.507, rel=0.05)
    assert 0.7 < stages[0]["least_gib"] / stages[0]["total_gib"] < 0.9
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
    assert max(stage["share"] for stage in found["memory"]["stages"]) > 0.85


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


def test_transformer_engine_has_no_fused_attention_on_a_v100(capsys: pytest.CaptureFixture[str]) -> None:
    config, chosen = str(JEAN_ZAY / "7.5b.yaml"), ("--set", "model.transformer_impl=transformer_engine")
    assert refused(capsys, config, "--nodes", "4", *V100, *chosen) == (
        f"{config}: model.transformer_impl: TransformerEngine has no fused attention on a v100-16gb: "
        "its compute capability is below 8.0; got transformer_engine; set it to local, or leave it out\n"
    )


def test_an_a100_has_no_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    config, chosen = str(JEAN_ZAY / "7.5b.yaml"), ("--set", "model.fp8=hybrid")
    assert refused(capsys, config, "--nodes", "4", "--gpu", "a100-80gb", *chosen) == (
        f"{config}: model.fp8: a a100-80gb has no fp8: its compute capability is below 8.9; got hybrid; leave it out\n"
    )


def test_fp8_halves_the_time_of_the_products_and_holds_copies_of_the_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", "--gpu", "h100", "--set", "precision=bf16")
    for name in ("granularity", "method", "num_layers"):
        arguments += ("--set", f"model.recompute_{name}=null")
    before, after = document(capsys, *arguments), document(capsys, *arguments, "--set", "model.fp8=hybrid")
    products = [it["cost"]["estimate"]["products"] for it in (before, after)]
    assert 0.45 < products[1] / products[0] < 0.7  # small products, and the output layer stays in bf16
    sizes = [{term["name"]: term["bytes"] for term in it["memory"]["stages"][1]["terms"]} for it in (before, after)]
    weights = after["memory"]["stages"][1]["layers"] * 12 * 4096**2 // 4
    assert sizes[1]["fp8 weights"] == 2 * weights
    assert sizes[1]["activations"] < 0.9 * sizes[0]["activations"]


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(JEAN_ZAY / "7.5b.yaml")
    arguments = (config, "--nodes", "4", "--gpus-per-node", "4", "--gpu", "8gib")
    found = document(capsys, *arguments, code=2)
    assert (found["verdict"], found["problems"][0]["field"]) == ("no-fit", "memory")
    assert main(["plan", *arguments]) == 2
    done = capsys.readouterr()
    assert done.err == (
        f"{config}: a rank of stage 0 needs more memory than the 8.0 GiB of a 8gib; got 10.1 GiB; "
        "see `tridock plan --search` for layouts that fit, or start it all the same with --force\n"
    )
    assert "does not fit" in done.out
    assert "not estimated: the GPU is unknown" in done.out


def test_without_a_gpu_memory_is_shown_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "configs/demo.yaml", "--hosts", "hostfiles/twin")
    assert (found["verdict"], found["memory"]["limit_gib"]) == ("fits", None)
    assert found["memory"]["stages"][0]["total_gib"] > 0
    assert found["cost"]["estimate"] is None
    assert any("no GPU is named" in note for note in found["notes"])


def test_amds_gpus_are_planned_and_it_is_said_that_nothing_starts_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "configs/demo.yaml", "--nodes", "1", "--gpu", "AMD_Instinct_MI300X")
    assert (found["memory"]["gpu"], found["cost"]["estimate"] is not None) == ("mi300x", True)
    assert any("Tridock's image has CUDA, not ROCm" in note for note in found["notes"])


def test_a_plan_contacts_no_host_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def contact(cluster: Cluster, **_: bool) -> None:
        raise AssertionError(f"contacts {cluster.head}")

    monkeypatch.setattr("tridock.ops.hosts.hosts.connect", contact)
    where = ("plan", "configs/demo.yaml", "--hosts", "hostfiles/example")
    for arguments in (where, (*where, "--offline"), (*where, "--json")):
        assert main(list(arguments)) == 0
    assert "gpu-1.example" in capsys.readouterr().out
    assert main([*where, "--search"]) == 2
    with pytest.raises(AssertionError, match=r"contacts gpu-1\.example"):
        main([*where, "--ask-hosts"])
    assert main([*where, "--ask-hosts", "--gpu", "h200"]) == 0


def test_the_gpu_and_the_network_stand_beside_the_hostfile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("".join(f"gpu-{number} slots=4\n" for number in range(4)))
    (tmp_path / "lab.yaml").write_text("gpu: v100-32gb\nnetwork_gbit: 200\n")
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--hosts", str(tmp_path / "lab"))
    found = document(capsys, *arguments)
    assert (found["verdict"], found["memory"]["gpu"]) == ("fits", "v100-32gb")
    assert (found["cost"]["rates"]["network_gb_s"], found["cost"]["rates"]["network_source"]) == (25.0, "given")
    assert not any("network" in note for note in found["notes"])
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
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:2] == [
        "tight: over 80 % · TP4 PP4 DP1 · 16 ranks",
        "memory       10.1 to 15.8 GiB per rank of 15.8 (v100-16gb)",
    ]
    assert lines[2].startswith("time         about ")
    for part in ("stage 3", "optimizer states", "pipeline bubble  42.9%", "2.0.0.3", "300.0 B tokens take about "):
        assert part in text, part


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 8), (16, 4), (16, 8), (64, 4), (64, 8)])
@pytest.mark.parametrize("width", [80, 100])
def test_a_plan_fits_a_screen(
    nodes: int, per_node: int, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    arguments = (str(JEAN_ZAY / "30b.yaml"), "--nodes", str(nodes), "--gpus-per-node", str(per_node), "--gpu", "h200")
    layout = ("parallel.pipeline_model_parallel_size=4", "batch.global_batch_size=1024")
    assert main(["plan", *arguments, *(word for change in layout for word in ("--set", change))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 62
    assert max(map(len, lines)) <= width
    columns = [line.split()[-4:] for line in lines if line.startswith(("weights ", "total ", "share of GPU "))]
    assert all(len(cells) == 4 for cells in columns)
    assert not any("…" in line for line in lines if not line.startswith(("… and ", " " * 17, "time ")))


def test_gpu_hours_and_their_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--tokens", "300e9")
    plain = document(capsys, *arguments)["cost"]["estimate"]
    assert plain["gpu_hours"] == pytest.approx(16 * 300e9 / plain["tokens_per_second"] / 3600)
    assert plain["cost"] is None
    priced = document(capsys, *arguments, "--cost-per-gpu-hour", "1.5")["cost"]["estimate"]
    assert priced["cost"] == pytest.approx(1.5 * plain["gpu_hours"])
    assert main(["plan", *arguments, "--cost-per-gpu-hour", "1.5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    hours, (low, high) = plain["gpu_hours"], plain["days_range"]
    assert low < plain["days"] < high
    assert text.endswith(
        f"300.0 B tokens take about {hours / 16 / 24:,.1f} days ({low:,.1f} days to {high:,.1f} days):"
        f" {hours:,.1f} GPU hours, "
        f"which cost {1.5 * hours:,.2f} at 1.5 each, at most {0.3 * hours:,.0f} kWh of the GPUs"
    )
    assert plain["energy_kwh"] == pytest.approx(0.3 * hours)
    assert refused(capsys, *arguments, "--cost-per-gpu-hour", "-2") == (
        "--cost-per-gpu-hour: must be a number above 0; got -2; give one, as in 2.5\n"
    )


def test_the_goodput_of_a_cluster_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", *V100, "--tokens", "300e9", "--cost-per-gpu-hour", "2")
    failing = ("--node-mtbf", "1000", "--checkpoint-gb-s", "1", "--set", "train.save_interval=200")
    found = document(capsys, *arguments, *failing)
    goodput, estimate = found["goodput"], found["cost"]["estimate"]
    assert goodput["mtbf_hours"] == 250
    assert goodput["checkpoint_seconds"] == found["checkpoint_bytes"] / 1e9 == pytest.approx(14 * 7.68, rel=0.01)
    own, best = goodput["save_interval"], goodput["best_save_interval"]
    assert own["seconds"] == pytest.approx(200 * estimate["iteration"])
    assert own["goodput"] <= best["goodput"] < 1
    for name, value in (("gpu_hours", estimate["gpu_hours"]), ("cost", estimate["cost"]), ("days", estimate["days"])):
        assert goodput[name] == pytest.approx(value / own["goodput"])
    assert main(["plan", *arguments, *failing]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f" goodput {own['goodput']:.1%} with train.save_interval 200 (" in text
    assert text.endswith("; 107.5 GB of a checkpoint take 1.8 minutes, and stop training for 646 ms")
    assert refused(capsys, *arguments, "--node-mtbf", "1000") == (
        "--checkpoint-gb-s: failures are counted with both of --node-mtbf and --checkpoint-gb-s; give it too\n"
    )
    assert refused(capsys, *arguments, *failing, "--restart-time", "-1") == (
        "--restart-time: must be a number above 0; got -1; give one, as in 120\n"
    )


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
    assert picture.stat().st_size > 4000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("configs/demo.yaml",),
            "--hosts: or --nodes must describe the cluster; give a DeepSpeed hostfile, or a number of --nodes",
        ),
        (
            ("configs/demo.yaml", "--hosts", "hostfiles/twin", "--nodes", "2"),
            "--hosts: or --nodes must describe the cluster; got both; "
            "give a DeepSpeed hostfile, or a number of --nodes",
        ),
        (("configs/demo.yaml", "--nodes", "0"), "--nodes: must be at least 1; got 0; give a number"),
        (
            ("configs/demo.yaml", "--nodes", "1", "--gpus-per-node", "-1"),
            "--gpus-per-node: must be at least 1; got -1; give a number",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--search"),
            "configs/demo.yaml: a search needs to know the GPU; give --gpu (with its memory alone, also --tflops), "
            "gpu: beside the hostfile, or --ask-hosts",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--tflops", "0", "--tokens", "nan", "--network-gbit", "-1"),
            "--network-gbit: must be a number above 0; got -1; give one, as in 400\n"
            "--tflops: must be a number above 0; got 0; give one, as in 150\n"
            "--tokens: must be a number above 0; got nan; give one, as in 300e9",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--plot", "map.pdf"),
            "map.pdf: the rank map is drawn as PNG or SVG; got .pdf; end the file's name in .png or .svg",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--include", "a", "--exclude", "b"),
            "--include: selects nodes of a hostfile; got a; give --hosts instead of --nodes, or leave it out\n"
            "--exclude: selects nodes of a hostfile; got b; give --hosts instead of --nodes, or leave it out",
        ),
        (
            ("configs/demo.yaml", "--hosts", "hostfiles/example", "--gpus-per-node", "4"),
            "--gpus-per-node: is the number of slots of --nodes; got 4; give --nodes too, or leave it out",
        ),
        (
            ("configs/demo.yaml", "--nodes", "1", "--ask-hosts"),
            "--ask-hosts: asks the hosts of a hostfile; give --hosts instead of --nodes, or leave it out",
        ),
        (
            ("--from-run", "runs/none", "--include", "a", "--gpus-per-node", "4"),
            "--gpus-per-node: is the number of slots of --nodes; got 4; give --nodes too, or leave it out\n"
            "--include: selects nodes of a hostfile; got a; give --hosts instead of --nodes, or leave it out",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *arguments) == f"{message}\n"


def test_an_unknown_gpu_beside_the_hostfile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("gpu-1 slots=4\n")
    (tmp_path / "lab.yaml").write_text("gpu: v200\n")
    text = refused(capsys, "configs/demo.yaml", "--hosts", str(tmp_path / "lab"))
    assert text.startswith(f"{tmp_path}/lab.yaml: gpu: is not a known GPU; got 'v200'; use one of ")


def test_one_field_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "parallel.zero_stage"]) == 0
    explained = capsys.readouterr().out
    assert explained.startswith("parallel.zero_stage (experiment)\n")
    found = document(capsys, "--explain", "parallel.zero_stage")
    assert found == {"version": 1, "explanation": explained.removesuffix("\n"), "problems": []}


# ---- a plan corrected by a run ------------------------------------------------------------------------------------


def test_a_run_corrects_its_own_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", [9.0, 0.25, 0.25], peak=2 << 30))
    found = document(capsys, "--from-run", run)
    correction = found["from_run"]
    assert found["problems"] == []
    assert (correction["run"], correction["gpu"], correction["iterations"]) == (run, "a100-80gb", 2)
    assert correction["seconds"]["measured"] == 0.25
    assert correction["seconds"]["planned"] < 0.1
    assert found["cost"]["estimate"]["iteration"] == pytest.approx(0.25)
    assert correction["memory"]["measured_gib"] == 2.0
    tensors = [term["gib"] for term in found["memory"]["stages"][0]["terms"]
               if term["name"] not in ("CUDA context", "NCCL", "fragmentation")]  # fmt: skip
    assert sum(tensors) == pytest.approx(2.0, abs=0.001)
    assert {rank["node"] for rank in found["ranks"]} == {"a", "b"}
    assert main(["plan", "--from-run", run]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Corrected by {run}" in text
    assert "median step" in text
    assert "250 ms" in text
    assert "over 2 logged iterations" in text


def test_a_run_corrects_the_plan_of_another_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", [9.0, 0.25, 0.25]))
    config = (str(JEAN_ZAY / "7.5b.yaml"), "--nodes", "4", "--gpus-per-node", "4", "--gpu", "a100-80gb")
    plain = document(capsys, *config)["cost"]["estimate"]["iteration"]
    found = document(capsys, *config, "--from-run", run)
    factor = found["from_run"]["seconds"]["factor"]
    assert found["cost"]["estimate"]["iteration"] == pytest.approx(factor * plain, rel=0.2)
    assert found["memory"]["gpu"] == "a100-80gb"
    searched = document(capsys, *config, "--from-run", run, "--search")
    assert searched["from_run"] == found["from_run"]
    seconds = next(one["seconds"] for one in searched["found"] if not one["set"])
    assert seconds == pytest.approx(found["cost"]["estimate"]["iteration"])


def test_a_run_on_cpus_gives_the_rate_of_its_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", [9.0, 0.25], "cpu"))
    found = document(capsys, "--from-run", run)
    assert found["cost"]["estimate"]["iteration"] == pytest.approx(0.25)
    assert found["cost"]["rates"]["tflops_source"] == f"measured: {run}"
    assert found["from_run"]["memory"] is None
    assert main(["plan", "--from-run", run]) == 0
    assert "unknown" in capsys.readouterr().out.partition("Corrected by")[2]
    where = f"{tmp_path}/a/experiment.yaml: a search needs to know the GPU"
    assert refused(capsys, "--from-run", run, "--search") == (
        f"{where}; give --gpu with the memory of a device, as in 24gib\n"
    )
    searched = document(capsys, "--from-run", run, "--search", "--gpu", "24gib")
    assert any(not one["set"] and one["seconds"] == pytest.approx(0.25) for one in searched["found"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--tflops", "50"),
            "--tflops: sets what --from-run takes from the run; got 50; leave one of the two out",
        ),
        (
            ("--gpu", "h200"),
            "--gpu: is not what {run} ran on, CPUs or an unknown GPU, of which only the run's rate is known; got h200; "
            "give a run on this GPU, the memory of a device alone (as in 24gib), or leave --from-run out",
        ),
    ],
)
def test_what_a_run_cannot_correct(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = str(write_run(tmp_path / "a", [9.0, 0.25], "cpu"))
    assert refused(capsys, "--from-run", run, *arguments) == f"{message.format(run=run)}\n"
    found = document(capsys, "--from-run", run, *arguments, code=2)
    assert found["problems"][0]["message"] == message.format(run=run)


# ---- why -------------------------------------------------------------------------------------------------------------


def test_a_program_has_its_slots_planned_and_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{name: mine, engine: command, command: [torchrun, train.py], launch: {master_port: 29500}}\n")
    where = (str(path), "--nodes", "2", "--gpus-per-node", "2")
    assert main(["plan", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine: 4 ranks on 2 nodes; what a program needs of memory and time is not known"
    assert lines[1].startswith("node-0: slots 0, 1; ranks 0, 1; torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 ")
    assert lines[2].startswith("node-1: slots 0, 1; ranks 2, 3; torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 ")
    found = document(capsys, *where, "--set", "command=[deepspeed, t.py]")
    assert (found["verdict"], found["memory"]["stages"], found["cost"]) == ("fits", [], None)
    assert found["ranks"][3] == {"rank": 3, "node": "node-1", "slot": 1}
    what = "command: torchrun gets these options from Tridock; got --nnodes=2; "
    assert refused(capsys, *where, "--set", "command=[torchrun, --nnodes=2, t.py]").startswith(what)
    todo = "leave them out: they are about a model"
    assert refused(capsys, *where, "--search", "--plot", "a.svg") == (
        f"{path}: is your own program, without a model; got --search, --plot; {todo}\n"
    )


def test_a_program_on_the_head_is_planned_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{name: mine, engine: command, command: [mpirun, ./a.out]}\n")
    assert main(["plan", str(path), "--nodes", "2", "--gpus-per-node", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("node-0: slots 0; ranks 0; mpirun --hostfile ")
    assert lines[2] == "node-1: slots 0; ranks 1; started by node-0"
