"""Megatron-LM v1.1.5 on CPU ranks: every layout trains on real text, and the layouts agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import disturbed
from tests.distributed.kills import survive
from tests.distributed.ranks import Finished, Started, check_communication, events, losses, metrics
from tests.experiments import make_plan, with_fields
from tests.patience import MATRIX_S
from tridock.contracts.tokenizers import sha256_of_data
from tridock.data.corpus import prepare_demo
from tridock.engines import cost_model_of, rank_program
from tridock.engines.megatron_lm.checkpoint_layout import CheckpointLayout
from tridock.experiment import Experiment, dump_experiment
from tridock.layout.shape import LayoutShape
from tridock.plan.memory import memory_of_stage

pytestmark = pytest.mark.distributed

ITERATIONS = 20
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
WARMUP = "optimizer.lr_warmup_iters"
ZERO = "parallel.zero_stage"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel.strategy": "ddp"}),
    "zero0": (2, {ZERO: 0}),
    "zero1": (2, {ZERO: 1}),
    "zero2": (2, {ZERO: 2}),
    "zero3": (2, {ZERO: 3}),
    "tp2": (2, {TP: 2}),
    "pp2": (2, {PP: 2}),
    "pp3": (3, {PP: 3}),  # 4 layers: 2, 1 and 1
    "tp2-pp2": (4, {TP: 2, PP: 2}),
    "tp2-pp2-dp2-zero1": (8, {TP: 2, PP: 2, ZERO: 1}),
}


@pytest.fixture(scope="module")
def workspace(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    prepare_demo(folder / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=1_000_000)
    return folder


def experiment(**fields: Any) -> Experiment:
    base: dict[str, Any] = {
        "name": "small",
        "engine": "megatron-deepspeed",
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "parallel": {},
        "batch": {"micro_batch_size": 4, "global_batch_size": 8},
        "data": {
            "data_path": "data/demo/stdlib_text_document",
            "split": "80,10,10",
            "vocab_file": "data/demo/tokenizer/vocab.json",
            "merge_file": "data/demo/tokenizer/merges.txt",
        },
        "optimizer": {"lr": 2e-3, "min_lr": 1e-4, "lr_warmup_iters": 3, "clip_grad": 0.0},
        "precision": "fp32",
        "train": {
            "train_iters": ITERATIONS,
            "log_interval": 1,
            "eval_interval": 10,
            "eval_iters": 2,
            "save": False,
            "tensorboard": False,
        },
        # Workers of the data loader cost more than they bring for a model of this size.
        "megatron_args": ["--num-workers", "0"],
    }
    return with_fields(base, fields)


def begin(
    workspace: Path,
    source: Path,
    name: str,
    world_size: int,
    fault: str | None = None,
    module: str | None = None,
    by: str = "checkpointed",
    imports: str | None = None,
    **fields: Any,
) -> tuple[Path, Started]:
    """Starts a run, or another ``module`` with its arguments; ``fault`` is one of the program ``by``."""
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    plan = make_plan(experiment(**fields), {"localhost": range(world_size)}, name)
    resolved = experiment(**fields).resolved(plan.data_parallel_size)
    program = rank_program(resolved, plan, name, str(folder))
    (folder / "experiment.yaml").write_text(dump_experiment(resolved))
    for file, content in program.files.items():
        (folder / file).write_bytes(content)
    env = {**program.env, "TRIDOCK_MEGATRON": str(source)}
    arguments = ["-m", module or program.module]
    if fault is not None:
        arguments = ["-m", f"tests.distributed.{by}", program.module, fault]
    return folder, Started([*arguments, *program.arguments], folder, world_size, env, imports)


def train(workspace: Path, source: Path, name: str, world_size: int, **fields: Any) -> tuple[Path, Finished]:
    folder, ranks = begin(workspace, source, name, world_size, **fields)
    with ranks as started:
        finished = started.wait()
    return folder, finished


Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(workspace: Path, source: Path) -> Runs:
    """The run's folder of a layout, trained when first asked for; all layouts see the same global batches."""

    @cache
    def trained(layout: str) -> Path:
        world_size, fields = LAYOUTS[layout]
        folder, finished = train(workspace, source, layout, world_size, **fields)
        assert finished.codes == [0] * world_size, finished.out[0][-5000:]
        for text in (*finished.out, *finished.err):
            for mark in ("terminate called", "Traceback", "leaked", "Warning:"):
                assert mark not in text, text
        return folder

    return trained


def train_losses(folder: Path) -> list[float]:
    return [loss for (_, split), loss in losses(folder).items() if split == "train"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_falls(runs: Runs, layout: str) -> None:
    found = train_losses(runs(layout))
    assert len(found) == ITERATIONS
    assert found[0] > 6.0
    assert found[-1] < found[0] - 0.5
    assert losses(runs(layout))[(ITERATIONS, "valid")] < found[0]
    assert losses(runs(layout))[(ITERATIONS, "test")] < found[0]
    assert set(losses(runs(layout))) >= {(10, "valid"), (ITERATIONS, "valid"), (ITERATIONS, "test")}
    assert events(runs(layout))[:2] == ["run_started", "world_formed"]
    assert "model_built" in events(runs(layout))
    assert events(runs(layout))[-1] == "run_finished"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_agree_exactly(runs: Runs, stage: int) -> None:
    assert losses(runs(f"zero{stage}")) == losses(runs("zero0"))


BUILT: dict[str, tuple[int, dict[str, Any]]] = {"dp4": (4, {}), "tp2-dp2": (4, {TP: 2})}


@pytest.mark.parametrize("layout", BUILT)
def test_no_rank_of_zero_3_holds_the_model_whole(workspace: Path, source: Path, layout: str) -> None:
    """While the model is built a rank holds its parts and a tensor; before the first step, what the plan says."""
    world_size, fields = BUILT[layout]
    fields = {
        **fields, ZERO: 3, "model.num_layers": 8, "model.hidden_size": 128, "model.vocab_size": 500,
        "batch.global_batch_size": 16, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}},
    }  # fmt: skip
    module = "tests.distributed.startup_v115"
    _, ranks = begin(workspace, source, f"built-{layout}", world_size, module=module, **fields)
    with ranks as started:
        finished = started.wait()
    assert finished.codes == [0] * world_size, finished.out[0][-5000:]
    given, replicas = experiment(**fields), world_size // fields.get(TP, 1)
    start = memory_of_stage(given, 0, LayoutShape(replicas, 1, world_size), None).startup_bytes
    whole = 4 * cost_model_of(given).parameters(given, 0).total
    for out in finished.out:
        building, starting = json.loads(out.splitlines()[-1])
        assert whole / replicas < building < whole / replicas + 2 * LARGEST
        assert 0.97 * start < starting < 1.03 * start + LARGEST


LARGEST = 4 * 4 * 128 * 128
"""Bytes of the largest tensor, without tensor parallelism. Gloo's thread may still hold the one before."""


def test_every_field_of_a_logged_iteration(runs: Runs) -> None:
    records = [record for (_, split), record in metrics(runs("zero1")).items() if split == "train"]
    assert [record["iteration"] for record in records] == list(range(1, ITERATIONS + 1))
    assert [record["consumed_samples"] for record in records] == list(range(8, 8 * ITERATIONS + 1, 8))
    assert list(records[0]) == [
        "iteration", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "consumed_samples", "loss_scale",
        "phases", "memory_bytes",
    ]  # fmt: skip


@pytest.mark.parametrize(("layout", "more"), [("zero1", set()), ("pp2", {"pipeline_wait"})])
def test_where_the_time_of_a_step_goes(runs: Runs, layout: str, more: set[str]) -> None:
    records = [record for (_, split), record in metrics(runs(layout)).items() if split == "train"]
    phases = {"data", "forward", "backward", "gradient_sync", "optimizer", "other"} | more
    for record in records[1:]:
        assert set(record["phases"]) == phases
        assert sum(record["phases"].values()) == pytest.approx(record["step_time_s"], rel=0.2, abs=5e-3)
    assert [len(record["memory_bytes"]) for record in records if "memory_bytes" in record] == [2] * 5


@pytest.mark.parametrize("layout", ["zero1", "pp2"])
def test_communication_is_measured(workspace: Path, source: Path, layout: str) -> None:
    _, fields = LAYOUTS[layout]
    more = {"train.train_iters": 8, "train.eval_interval": 0, "train.profile_iters": 2}
    folder, finished = train(workspace, source, f"{layout}-profiled", 2, **fields, **more)
    assert finished.codes == [0, 0], finished.out[0][-5000:]
    check_communication(folder)


LAYOUT_TOLERANCE = 0.1
"""Absolute, after 20 steps from other random weights: a split layer and a stage draw theirs in another order."""


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith("zero")])
def test_layouts_agree(runs: Runs, layout: str) -> None:
    assert train_losses(runs(layout)) == pytest.approx(train_losses(runs("zero0")), abs=LAYOUT_TOLERANCE)


def test_deepspeed_and_plain_data_parallelism_agree(runs: Runs) -> None:
    """The same weights and samples without DeepSpeed: the sums come in another order, nothing else differs."""
    assert train_losses(runs("ddp")) == pytest.approx(train_losses(runs("zero0")), abs=1e-4)


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulated": (2, {ZERO: 1, "batch.micro_batch_size": 2}),
    "in-cpu": (2, {ZERO: 0, "model.checkpoint_activations": True, "model.checkpoint_in_cpu": True}),
    "ddp-fp16": (2, {"parallel.strategy": "ddp", "precision": "fp16", "fp16.initial_scale_power": 8}),
    "stored": (2, {ZERO: 0, "model.checkpoint_activations": True, "model.checkpoint_num_layers": 2}),
    "partitioned": (
        2,
        {
            TP: 2,
            "model.checkpoint_activations": True,
            "model.partition_activations": True,
            "model.contiguous_checkpointing": True,
            "model.synchronize_each_layer": True,
        },
    ),
}


@pytest.mark.parametrize(
    ("variant", "like"),
    [("accumulated", "zero0"), ("stored", "zero0"), ("partitioned", "tp2"), ("in-cpu", "zero0"), ("ddp-fp16", "zero0")],
)
def test_how_the_work_is_done_does_not_matter(
    runs: Runs, workspace: Path, source: Path, variant: str, like: str
) -> None:
    world_size, fields = VARIANTS[variant]
    folder, finished = train(workspace, source, variant, world_size, **fields)
    assert finished.codes == [0] * world_size, finished.out[0][-5000:]
    tolerance = 0.02 if fields.get("precision") == "fp16" else 1e-4
    assert train_losses(folder) == pytest.approx(train_losses(runs(like)), abs=tolerance)


def test_clipping_reports_the_norm(workspace: Path, source: Path) -> None:
    folder, finished = train(
        workspace, source, "clipped", 2, **{ZERO: 2, "optimizer.clip_grad": 0.5, "train.train_iters": 4, WARMUP: 2}
    )
    assert finished.codes == [0, 0], finished.out[0][-5000:]
    assert all(record["grad_norm"] > 0.5 for (_, split), record in metrics(folder).items() if split == "train")


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {ZERO: 1, "batch.micro_batch_size": 2}),
    "zero3": (2, {ZERO: 3}),
    "ddp": (2, {"parallel.strategy": "ddp"}),
    "tp2-pp2": (4, {TP: 2, PP: 2, ZERO: 1, "batch.micro_batch_size": 2}),
}


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_continues_the_very_same_losses(workspace: Path, source: Path, layout: str) -> None:
    world_size, fields = RESUMED[layout]
    common = fields | {"train.eval_interval": 0, "model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
    # Upstream keeps the latest checkpoint's name only: the whole run saves in its middle, and not at its end.
    saving = {"train.save": True, "train.save_interval": 6}
    first, finished = train(
        workspace, source, f"first-{layout}", world_size, **common, **saving, **{"optimizer.lr_decay_iters": 10},
        **{"train.train_iters": 6},
    )  # fmt: skip
    assert finished.codes == [0] * world_size, finished.out[0][-5000:]
    whole, finished = train(
        workspace, source, f"whole-{layout}", world_size, **common,
        **{"optimizer.lr_decay_iters": 10, "train.train_iters": 10},
    )  # fmt: skip
    assert finished.codes == [0] * world_size, finished.out[0][-5000:]
    load = {"train.load": f"runs/{first.name}/checkpoints"}
    part, finished = train(
        workspace, source, f"resumed-{layout}", world_size, **common, **load,
        **{"optimizer.lr_decay_iters": 10, "train.train_iters": 10},
    )  # fmt: skip
    assert finished.codes == [0] * world_size, finished.out[0][-5000:]
    assert "checkpoint_saved" in events(first)
    replicas = make_plan(experiment(**fields), {"localhost": range(world_size)}, layout).data_parallel_size
    (saved,) = first.glob("checkpoints/*/layout.json")
    written = json.loads(saved.read_text())
    made_with = sha256_of_data(workspace / experiment(**fields).data.data_path)
    assert made_with
    ours = CheckpointLayout.of(experiment(**fields), replicas)
    assert written.pop("training")["optimizer.lr_decay_iters"] == "10"
    assert written == {**ours.to_json(), "tokenizer_sha256": made_with, "updates": 6}
    assert "checkpoint_loaded" in events(part)
    assert train_losses(part) == train_losses(whole)[6:]


def test_what_happens_to_a_run_does_not_change_its_losses(workspace: Path, source: Path) -> None:
    fields = {ZERO: 1, "train.train_iters": disturbed.ITERATIONS, "train.eval_interval": 0}
    dropout = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}

    def start(name: str, fault: str | None, **more: Any) -> tuple[Path, Started]:
        return begin(workspace, source, name, 2, fault, **fields, **dropout, **more)

    disturbed.live_through(start, "*zero_pp_rank_1*", 1)


@pytest.mark.timeout(MATRIX_S)
@pytest.mark.parametrize("points", [2, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", ["zero1", pytest.param("ddp", marks=pytest.mark.full)])
def test_a_kill_at_any_point_of_a_save_changes_no_loss(workspace: Path, source: Path, layout: str, points: int) -> None:
    _, fields = LAYOUTS[layout]
    dropout = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
    name = f"{layout}-{points}-kills"

    def start(run: str, fault: str | None, **more: Any) -> tuple[Path, Started]:
        given = {**fields, **dropout, **more}
        return begin(workspace, source, f"{name}-{run}", 2, fault, by="killed", imports="deepspeed", **given)

    survive(start, workspace, name, points)


def test_what_upstream_alone_has_written_is_loaded(workspace: Path, source: Path) -> None:
    """It lists no files: such a checkpoint is upstream's to judge, also beside one that Tridock has set aside."""
    schedule = {WARMUP: 0, "optimizer.lr_decay_iters": 4, "train.eval_interval": 0}
    saving = {"parallel.strategy": "ddp", "train.save": True, "train.train_iters": 2, **schedule}
    first, finished = train(workspace, source, "listed", 2, **saving)
    assert finished.codes == [0, 0], finished.out[0][-5000:]
    (first / "checkpoints/iter_0000004.set-aside-1").mkdir()
    (first / "checkpoints/iter_0000002/files.json").rename(first / "checkpoints/iter_0000004.set-aside-1/files.json")
    load = {"train.load": "runs/listed/checkpoints", "train.train_iters": 4}
    folder, finished = train(workspace, source, "unlisted", 2, **(saving | load))
    assert finished.codes == [0, 0], finished.out[0][-5000:]
    assert len(train_losses(folder)) == 2


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_one_folder_for_all_starts(workspace: Path, source: Path, strategy: str) -> None:
    """Upstream's ``--save`` and ``--load`` of one folder: the first start finds nothing, the second continues."""
    saved = f"saved-{strategy}"
    fields = {
        "parallel.strategy": strategy, "train.checkpoint_folder": saved, "train.load": saved, "train.save": True,
        "train.eval_interval": 0, WARMUP: 0, "optimizer.lr_decay_iters": 4, "batch.global_batch_size": 4,
    }  # fmt: skip
    folders = []
    for iterations in (2, 4):
        folder, finished = train(
            workspace, source, f"{strategy}-{iterations}", 1, **fields, **{"train.train_iters": iterations}
        )
        assert finished.codes == [0], finished.out[0][-5000:]
        begins = f"{workspace}/{saved} holds no checkpoint yet: training begins from scratch\n" in finished.out[0]
        assert begins == (iterations == 2)
        folders.append(folder)
    assert [len(train_losses(folder)) for folder in folders] == [2, 2]
    assert ["checkpoint_loaded" in events(folder) for folder in folders] == [False, True]
    # Another schedule is chosen, which upstream then overrides.
    other = {**fields, "train.train_iters": 6, "optimizer.min_lr": 1e-3}
    _, finished = train(workspace, source, f"{strategy}-refused", 1, **other)
    assert finished.codes == [2]
    text = f"optimizer.min_lr: the checkpoint {saved} was saved with "
    assert [line.startswith(text) for line in finished.out[0].splitlines()][-1], finished.out[0]
    folder, finished = train(
        workspace, source, f"{strategy}-chosen", 1, **other, **{"train.override_checkpoint": ["optimizer.min_lr"]}
    )
    assert finished.codes == [0], finished.out[0][-5000:]
    assert [it["lr"] for (_, split), it in metrics(folder).items() if split == "train"] == [1e-3, 1e-3]


def test_a_missing_checkpoint_is_no_fresh_start(workspace: Path, source: Path) -> None:
    folder, finished = train(workspace, source, "lost", 1, **{"train.load": "runs/none/checkpoints"})
    assert finished.codes == [2]
    assert (
        f"train.load: holds no checkpoint of Megatron-LM v1.1.5; got {workspace}/runs/none/checkpoints; "
        "give the checkpoints folder of a run of this engine"
    ) in finished.out[0]
    assert events(folder)[-1] == "run_failed"
