"""megatron-core on CPU ranks: every layout trains on real text, all agree, and a checkpoint fits any of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases import thinned
from tests.distributed.megatron_core_runs import (
    CHANGED,
    CONTINUED,
    DISTRIBUTED,
    DROPOUT,
    DROPPED,
    EP,
    ETP,
    GATED,
    ITERATIONS,
    LAYOUTS,
    LENGTH,
    LLAMA_LAYOUTS,
    MIXTRAL,
    MIXTURE_LAYOUTS,
    MIXTURES_CHANGED,
    PP,
    SHORT,
    SOME,
    SOME_CHANGED,
    SOME_CONTINUED,
    SOME_LLAMA,
    SOME_MIXTURES,
    SOME_MIXTURES_CHANGED,
    SP,
    TP,
    Runs,
    experiment,
    make_run,
    start,
    trained_together,
)
from tests.distributed.ranks import (
    ROOT,
    Started,
    asked_for,
    check_communication,
    events,
    losses,
    metrics,
    run_several,
)
from tests.experiments import make_plan
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.experiment import dump_experiment, load_experiment

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    prepare_demo(folder / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=1_000_000)
    return folder


@pytest.fixture(scope="module")
def runs(workspace: Path) -> Runs:
    return trained_together(workspace, "layout", LAYOUTS, SOME)


@pytest.fixture(scope="module")
def llamas(workspace: Path) -> Runs:
    return trained_together(workspace, "kind", LLAMA_LAYOUTS, SOME_LLAMA, **{"train.save": False})


def train_losses(folder: Path) -> list[float]:
    return [loss for (_, split), loss in losses(folder).items() if split == "train"]


@pytest.mark.parametrize("layout", thinned(LAYOUTS, SOME))
def test_the_loss_falls(runs: Runs, layout: str) -> None:
    found = losses(runs(layout))
    assert len(train_losses(runs(layout))) == ITERATIONS
    assert found[(1, "train")] > 6.0
    assert found[(ITERATIONS, "train")] < found[(1, "train")] - 0.4
    # How far it falls, and whether the second half of so few steps still helps, is the text's: each Python has its own.
    assert found[(7, "valid")] < found[(1, "train")]
    assert found[(ITERATIONS, "valid")] < found[(1, "train")]
    assert found[(ITERATIONS, "test")] < found[(1, "train")]


LAYOUT_TOLERANCE = 1e-5
"""Absolute, on every loss of these fp32 steps: the weights are the same, and sums come in another order."""


@pytest.mark.parametrize("layout", thinned([layout for layout in LAYOUTS if layout != "one"], SOME))
def test_layouts_agree(runs: Runs, layout: str) -> None:
    wanted = losses(runs("one"))
    assert losses(runs(layout)) == {place: pytest.approx(loss, abs=LAYOUT_TOLERANCE) for place, loss in wanted.items()}


@pytest.mark.parametrize("layout", thinned([it for it in LLAMA_LAYOUTS if not it.endswith("-one")], SOME_LLAMA))
def test_layouts_of_a_llama_agree(llamas: Runs, layout: str) -> None:
    wanted = losses(llamas(f"{layout.partition('-')[0]}-one"))
    assert wanted[(ITERATIONS, "train")] < wanted[(1, "train")] - 0.4
    assert losses(llamas(layout)) == {
        place: pytest.approx(loss, abs=LAYOUT_TOLERANCE) for place, loss in wanted.items()
    }


@pytest.fixture(scope="module")
def mixtures(workspace: Path) -> Runs:
    return trained_together(workspace, "mixture", MIXTURE_LAYOUTS, SOME_MIXTURES)


@pytest.mark.parametrize("layout", thinned([it for it in MIXTURE_LAYOUTS if "one" not in it], SOME_MIXTURES))
def test_layouts_of_a_mixture_of_experts_agree(mixtures: Runs, layout: str) -> None:
    """Also in what balances the load, which is a part of every micro batch's gradient."""
    kind = layout.partition("-")[0]
    wanted = losses(mixtures(f"{kind}-one" if kind in ("shared", "gated") else "one"))
    assert wanted[(ITERATIONS, "train")] < wanted[(1, "train")] - 0.4
    assert losses(mixtures(layout)) == {
        place: pytest.approx(loss, abs=LAYOUT_TOLERANCE) for place, loss in wanted.items()
    }


@pytest.mark.full
def test_layouts_of_a_gated_mixture_depart_only_where_two_scores_are_as_good_as_equal(workspace: Path) -> None:
    """Of two seeds, with the second of which a token's scores of two experts differ by rounding alone in step 11: from
    there on, its experts are others. With the first one no scores are so near, and all losses agree."""
    found = {}
    for name, ranks, layout in (("one", 1, {}), ("tp2-sp-ep2", 2, {TP: 2, SP: True, EP: 2, ETP: 1})):
        folders = [
            make_run(workspace, f"routed-{name}-{seed}", ranks, **own | {"train.seed": seed, "train.save": False})
            for own in [{**MIXTRAL, **GATED, **layout, "train.train_iters": 20, "optimizer.lr_decay_iters": 20}]
            for seed in (GATED["train.seed"], 1234)
        ]
        argv = ["-m", "tests.distributed.router_margins", *map(str, folders)]
        with Started(argv, folders[0], ranks, {}, "megatron-core") as started:
            finished = started.wait()
        assert finished.codes == [0] * ranks, "\n".join(finished.err)
        found[name] = [(train_losses(folder), json.loads((folder / "margins.json").read_text())) for folder in folders]
    departed = []
    for (ours, _), (theirs, margins) in zip(found["tp2-sp-ep2"], found["one"], strict=True):
        assert len(ours) == len(theirs) == len(margins) == 20
        apart = [step for step, pair in enumerate(zip(ours, theirs, strict=True)) if abs(pair[0] - pair[1]) > 1e-5]
        assert not apart or min(margins[: apart[0] + 1]) < 1e-7
        departed.append(bool(apart))
    assert min(found["one"][0][1]) > 5e-7
    assert not departed[0]


@pytest.mark.full
def test_layouts_of_a_mixture_of_experts_differ_by_rounding_only(workspace: Path) -> None:
    """In fp64, where no rounding moves a token to another expert: the routing, the gate and the balancing loss, whose
    gradients are summed over other ranks than those of the layers."""
    fields = {**LENGTH, "model.moe_router_pre_softmax": True, "train.save": False}
    found = {}
    for name, ranks in (("shared-one", 1), ("shared-tp2-sp-ep2", 2)):
        folder = make_run(workspace, f"float64-{name}", ranks, **{**MIXTURE_LAYOUTS[name][1], **fields})
        with Started(["-m", "tests.distributed.in_float64", str(folder)], folder, ranks, {}) as started:
            finished = started.wait()
        assert finished.codes == [0] * ranks, "\n".join(finished.err)
        found[name] = train_losses(folder)
    assert found["shared-one"][-1] < found["shared-one"][0] - 0.2
    assert found["shared-tp2-sp-ep2"] == pytest.approx(found["shared-one"], abs=1e-12, rel=0)


def test_what_travels_during_the_computation_changes_no_loss(workspace: Path) -> None:
    """Of replicas that sum whole gradients, and of those with the distributed optimizer, a resumed run too."""
    found, reductions = {}, {}
    for mode in ("overlap", "wait"):
        folders = [
            make_run(workspace, f"{mode}-{name}", 2, **own, **LENGTH, **{"train.save": True, "train.save_interval": 4})
            for name, own in (("whole", {}), ("distributed", {DISTRIBUTED: True}))
        ]
        resumed = {"train.load": f"runs/{folders[1].name}/checkpoints/iter_0000004"}
        folders.append(make_run(workspace, f"{mode}-resumed", 2, **{DISTRIBUTED: True}, **LENGTH, **resumed))
        argv = ["-m", "tests.distributed.small_buckets", mode, *map(str, folders)]
        with Started(argv, folders[0], 2, {}, "megatron-core") as started:
            finished = started.wait()
        assert finished.codes == [0, 0], "\n".join(finished.err)
        found[mode] = [losses(folder) for folder in folders]
        assert found[mode][1] == found[mode][1] | found[mode][2]
        reductions[mode] = int(finished.out[1].rsplit("started: ", 1)[1])
    # Parts of other buckets: their norms are summed up in another order.
    for ours, theirs in zip(found["overlap"], found["wait"], strict=True):
        assert ours == pytest.approx(theirs, abs=LAYOUT_TOLERANCE)
    assert reductions["overlap"] > reductions["wait"] == 0


def test_gradients_that_the_products_accumulate_change_no_loss(workspace: Path) -> None:
    """As with apex's kernel, which adds a micro batch's gradient in the matrix product: with tied tables on one stage
    and on two, whose first one also gets gradients from its tokens."""
    found, added = {}, {}
    layouts = {"tensor": {TP: 2, SP: True}, "pipeline": {PP: 2}}
    for mode in ("fused", "apart"):
        own = {**LENGTH, "train.train_iters": 4, "train.save": False}
        folders = [make_run(workspace, f"{mode}-{name}", 2, **fields, **own) for name, fields in layouts.items()]
        argv = ["-m", "tests.distributed.fused_gradients", mode, *map(str, folders)]
        with Started(argv, folders[0], 2, {}, "megatron-core") as started:
            finished = started.wait()
        assert finished.codes == [0, 0], "\n".join(finished.err)
        found[mode] = [losses(folder) for folder in folders]
        added[mode] = int(finished.out[1].rsplit("added: ", 1)[1])
    for ours, theirs in zip(found["fused"], found["apart"], strict=True):
        assert ours == pytest.approx(theirs, abs=LAYOUT_TOLERANCE)
    assert added["fused"] > added["apart"] == 0


def test_recomputing_changes_nothing(workspace: Path) -> None:
    """Not even what dropout draws."""
    dropped = trained_together(workspace, "dropped", DROPPED, **LENGTH, **DROPOUT, **{"train.save": False})
    assert losses(dropped("full")) == losses(dropped("selective")) == losses(dropped("kept"))


def test_every_field_of_a_logged_iteration(runs: Runs) -> None:
    records = [record for (_, split), record in metrics(runs("tp2-pp2")).items() if split == "train"]
    assert [record["iteration"] for record in records] == list(range(1, ITERATIONS + 1))
    assert [record["consumed_samples"] for record in records] == list(range(8, 8 * ITERATIONS + 1, 8))
    assert list(records[0]) == [
        "iteration", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "consumed_samples", "loss_scale",
        "phases", "memory_bytes",
    ]  # fmt: skip
    stages = {"data", "forward", "backward", "gradient_sync", "pipeline_wait", "optimizer", "other"}
    for record in records[1:]:
        assert set(record["phases"]) == stages
        assert sum(record["phases"].values()) == pytest.approx(record["step_time_s"], rel=0.2, abs=5e-3)
    one = [record for (_, split), record in metrics(runs("one")).items() if split == "train"]
    for name in ("lr", "grad_norm", "loss_scale"):
        assert [record[name] for record in records] == pytest.approx([record[name] for record in one], rel=1e-4)


def test_communication_is_measured(workspace: Path) -> None:
    folder = make_run(workspace, "profiled", 2, **LENGTH, **{PP: 2, "train.save": False, "train.profile_iters": 2})
    assert start(folder, 2).codes == [0, 0]
    check_communication(folder)


def test_checkpoints_appear_whole_and_the_pointer_last(runs: Runs) -> None:
    folder = runs("tp2-pp2") / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000006", "iter_0000012", "iter_0000014", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    pointer = folder / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "14"
    whole = folder / "iter_0000014"
    assert {".metadata", "common.pt", "metadata.json", "tridock.json"} < {path.name for path in whole.iterdir()}
    assert all(path.stat().st_mtime_ns <= pointer.stat().st_mtime_ns for path in whole.iterdir())


@pytest.fixture(scope="module")
def short(workspace: Path) -> Runs:
    return trained_together(workspace, "short", SHORT, **{"train.save": False})


@pytest.mark.parametrize(("precision", "scale"), [("bf16", 1.0), ("fp16", 2.0**12)])
def test_short_formats_train_as_fp32_does(runs: Runs, short: Runs, precision: str, scale: float) -> None:
    assert train_losses(short(precision)) == pytest.approx(train_losses(runs("one")), abs=0.02)
    records = [record for (_, split), record in metrics(short(precision)).items() if split == "train"]
    assert {record["loss_scale"] for record in records} == {scale}


def test_a_step_that_overflows_is_skipped(short: Runs) -> None:
    records = [record for (_, split), record in metrics(short("fp16-overflow")).items() if split == "train"]
    assert [record["grad_norm"] for record in records[:3]] == [None] * 3
    assert [record["loss_scale"] for record in records[:3]] == [2.0**30, 2.0**29, 2.0**28]
    assert records[-1]["grad_norm"] is not None


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Runs:
    return trained_together(workspace, "whole", CONTINUED, SOME_CONTINUED, **LENGTH, **DROPOUT)


@pytest.fixture(scope="module")
def continued(workspace: Path, whole: Runs) -> Runs:
    loads = {
        name: (ranks, own | {"train.load": f"runs/{whole(name).name}/checkpoints/iter_0000006"})
        for name, (ranks, own) in CONTINUED.items()
    }
    return trained_together(workspace, "continued", loads, SOME_CONTINUED, **LENGTH, **DROPOUT, **{"train.save": False})


@pytest.mark.parametrize("layout", thinned(CONTINUED, SOME_CONTINUED))
def test_a_resumed_run_continues_the_very_same_losses(whole: Runs, continued: Runs, layout: str) -> None:
    """In other processes, with dropout: bit by bit."""
    assert "checkpoint_loaded" in events(continued(layout))
    assert train_losses(continued(layout)) == train_losses(whole(layout))[6:]
    assert len(train_losses(continued(layout))) == 4


@pytest.fixture(scope="module")
def changed(workspace: Path, runs: Runs) -> Runs:
    loads = {
        name: (ranks, own | {"train.load": f"runs/{runs(source).name}/checkpoints/iter_0000006"})
        for name, (source, ranks, own) in CHANGED.items()
    }
    return trained_together(workspace, "changed", loads, SOME_CHANGED, **{"train.save": False})


@pytest.mark.parametrize("change", thinned(CHANGED, SOME_CHANGED))
def test_a_checkpoint_continues_on_another_layout(runs: Runs, changed: Runs, change: str) -> None:
    wanted = train_losses(runs(CHANGED[change][0]))[6:]
    assert train_losses(changed(change)) == pytest.approx(wanted, abs=LAYOUT_TOLERANCE)


@pytest.fixture(scope="module")
def mixtures_changed(request: pytest.FixtureRequest, workspace: Path, mixtures: Runs) -> Runs:
    loads = {
        name: (ranks, MIXTRAL | own | {"train.load": f"runs/{mixtures(source).name}/checkpoints/iter_0000005"})
        for name, (source, ranks, own) in asked_for(request, MIXTURES_CHANGED, SOME_MIXTURES_CHANGED).items()
    }
    return trained_together(workspace, "mixture-changed", loads, SOME_MIXTURES_CHANGED, **{"train.save": False})


@pytest.mark.parametrize("change", thinned(MIXTURES_CHANGED, SOME_MIXTURES_CHANGED))
def test_experts_of_a_checkpoint_continue_on_other_ranks(mixtures: Runs, mixtures_changed: Runs, change: str) -> None:
    wanted = train_losses(mixtures(MIXTURES_CHANGED[change][0]))[5:]
    assert len(wanted) == 9
    assert train_losses(mixtures_changed(change)) == pytest.approx(wanted, abs=LAYOUT_TOLERANCE)


def test_the_program_of_a_rank(workspace: Path) -> None:
    """As a launcher starts it: the latest checkpoint of another run, the log, the events, and nothing to explain."""
    schedule = {"optimizer.lr_warmup_iters": 0, "optimizer.lr_decay_iters": 4}
    first = make_run(workspace, "first", 1, **schedule, **{"train.train_iters": 2})
    assert start(first, 1).codes == [0]
    load = {"train.train_iters": 4, "train.load": "runs/first/checkpoints"}
    folder = make_run(workspace, "second", 2, **schedule, **load)
    plan = make_plan(experiment(), {"localhost": range(2)}, "second")
    program = rank_program(experiment(), plan, "second", str(folder))
    with Started(["-m", program.module, *program.arguments], folder, 2, program.env) as started:
        finished = started.wait()
    assert finished.codes == [0, 0], finished.out[0]
    assert events(folder) == [
        "run_started", "world_formed", "checkpoint_loaded", "model_built", "evaluation", "checkpoint_saved",
        "evaluation", "run_finished",
    ]  # fmt: skip
    assert "small: 0.24 M parameters, TP1 PP1 DP2, fp32, 2 cpu ranks\n" in finished.out[0]
    assert len(train_losses(folder)) == 2
    for text in (*finished.out, *finished.err, (folder / "logs/rank-1.log").read_text()):
        for mark in ("terminate called", "Traceback", "leaked", "Warning:"):
            assert mark not in text, text


LIMITED = """
import resource, signal, sys
from tridock.train.megatron_core.pretrain_gpt import main
from tridock.train.rank.run import end
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
end(main(), at_once=True)
"""


def test_a_checkpoint_that_cannot_be_written(workspace: Path, tmp_path: Path) -> None:
    """No room for the file: the run says so and stops, and no half checkpoint stays."""
    folder = make_run(workspace, "full", 1)
    program = tmp_path / "limited.py"
    program.write_text(LIMITED)
    with Started([str(program), "--run-folder", str(folder)], folder, 1, {}, "megatron-core") as started:
        finished = started.wait()
    assert finished.codes == [4]
    assert f"{folder}/checkpoints/iter_0000006: the checkpoint could not be written; got " in finished.out[0]
    assert "free space there or fix its permissions" in finished.out[0]
    assert "Traceback" not in finished.out[0]
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(("twin", "ranks"), [("tiny-7.5b", 4), pytest.param("tiny-76b", 6, marks=pytest.mark.full)])
def test_the_tiny_twins_of_jean_zay_train(workspace: Path, twin: str, ranks: int) -> None:
    """As they are shipped, for two steps."""
    shorter = ["train.train_iters=2", "train.eval_interval=0", "optimizer.lr_warmup_iters=1", "train.save=false"]
    shipped = load_experiment(ROOT / f"configs/jean-zay/{twin}.yaml", [*shorter, "train.eval_iters=1"])
    folder = workspace / "runs" / twin
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(dump_experiment(shipped))
    run_several([folder], ranks)
    assert [loss > 5.5 for loss in train_losses(folder)] == [True, True]


def test_a_world_of_another_size_is_refused(workspace: Path) -> None:
    folder = make_run(workspace, "alone", 1)
    finished = start(folder, 1, TRIDOCK_WORLD_SIZE="2")
    assert finished.codes == [4]
    assert finished.out[0].splitlines()[-1] == (
        "world size: the plan has 2 ranks, but another number found each other; got 1; "
        "check the hostfile that the launcher read (logs/launcher.log) and that every node started its ranks"
    )


def test_a_missing_checkpoint_is_no_fresh_start(workspace: Path) -> None:
    folder = make_run(workspace, "lost", 1, **{"train.load": "runs/none/checkpoints"})
    finished = start(folder, 1)
    assert finished.codes == [2]
    assert finished.out[0].splitlines()[-1] == (
        f"train.load: there is no checkpoint in {workspace}/runs/none/checkpoints; got no such folder; "
        "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    )
