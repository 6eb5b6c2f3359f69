"""The small experiment that `tridock rehearse` trains: legal by its engine's rules, with the real one's dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments import SMALL, with_fields
from tests.memory import cases
from tests.unit.engines.test_fields import CHANGED, accepted, declared
from tests.unit.test_configs import CONFIGS, LAYOUTS, REFUSED
from tridock.engines import ENGINES
from tridock.engines.fields import Refused
from tridock.experiment import Experiment, load_experiment
from tridock.layout.split import size_of_replica
from tridock.plan import assess
from tridock.plan.legality import layout_problems
from tridock.plan.shrunk import ITERATIONS, Shrunk, assumed_slots, shrink

DIMENSIONS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_shard_size"),
)
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_size", "seq_length", "experts")


def shrunk(experiment: Experiment, replicas: int, cores: int = 2) -> Shrunk:
    """The small experiment, if it is what every small experiment must be."""
    found = shrink(experiment, replicas, cores)
    small, real = found.experiment, found.real
    data = found.ranks // size_of_replica(small)
    assert found.ranks == data * size_of_replica(small)
    assert not layout_problems(small, found.ranks)
    assert Experiment.model_validate(small.model_dump(mode="json")) == small
    assert (data > 1) == (replicas > 1)
    for name in DIMENSIONS:
        before, after = getattr(real.parallel, name), getattr(small.parallel, name)
        assert (before is None) == (after is None)
        assert before is None or ((after > 1) == (before > 1) and after <= max(before, 2)), name
    if real.parallel.data_parallel_shard_size is not None:
        assert (small.parallel.data_parallel_shard_size == data) == (real.parallel.data_parallel_shard_size == replicas)
    steps = [one.batch.accumulation_steps(count) for one, count in ((real, replicas), (small, data))]
    assert (steps[0] > 1) == (steps[1] > 1)
    for name in SIZES:
        assert getattr(small.model, name) <= max(getattr(real.model, name), 8), name
    assert (small.model.query_groups < small.model.num_attention_heads) == (
        real.model.query_groups < real.model.num_attention_heads
    )
    assert (small.engine, small.precision, small.data, small.env) == (real.engine, real.precision, real.data, real.env)
    assert (small.trackers, small.notify, small.megatron_args) == (real.trackers, real.notify, real.megatron_args)
    assert small.train.train_iters == ITERATIONS
    return found


@pytest.mark.parametrize("cores", [1, 8, 64])
@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() | REFUSED))
def test_every_shipped_experiment_shrinks(name: str, cores: int) -> None:
    experiment = load_experiment(CONFIGS / f"{name}.yaml")
    for ranks, _ in LAYOUTS.get(name, [(128, "")]):
        shrunk(experiment, ranks // size_of_replica(experiment), cores)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_measured_experiment_shrinks(engine: str) -> None:
    """Several hundred, of every engine, strategy and layout."""
    found = [case for case in cases.CASES.values() if case.engine == engine]
    assert len(found) > 40
    for case in found:
        experiment = cases.experiment(case)
        shrunk(experiment, case.world_size // size_of_replica(experiment))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_experiment_with_any_field_shrinks(engine: str) -> None:
    """Each field with another value than its default, where the engine takes it."""
    tried = 0
    for path in CHANGED:
        if path == "engine" or isinstance(declared(ENGINES[engine].rules.fields, path), Refused):
            continue
        _, experiment = accepted(engine, path)
        if not layout_problems(experiment, 8):
            shrunk(experiment, 8 // size_of_replica(experiment))
            tried += 1
    assert tried > 60


SPLIT: dict[str, dict[str, Any]] = {
    "five dimensions": {
        "model": {"preset": "mixtral-8x7b", "seq_length": 4096},
        "parallel": {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 8,
            "virtual_pipeline_model_parallel_size": 4,
            "context_parallel_size": 4,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
    },
    "experts over replicas": {
        "model": {"preset": "mixtral-8x7b", "seq_length": 4096},
        "parallel": {"expert_model_parallel_size": 8, "pipeline_model_parallel_size": 4},
    },
    "unequal stages": {
        "model": {"preset": "llama-3.1-70b", "num_layers": 78, "seq_length": 8192},
        "parallel": {
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 4,
            "decoder_first_pipeline_num_layers": 19,
            "decoder_last_pipeline_num_layers": 19,
        },
    },
    "two unequal interleaved stages": {
        "model": {"preset": "gpt3-13b", "num_layers": 44, "seq_length": 2048},
        "parallel": {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "decoder_first_pipeline_num_layers": 20,
        },
    },
    "fewer query groups than tensor parallel ranks": {
        "model": {"preset": "gpt3-13b", "num_query_groups": 2, "seq_length": 2048},
        "parallel": {"tensor_model_parallel_size": 8},
    },
    "seven stages": {
        "model": {"preset": "gpt3-13b", "num_layers": 42, "seq_length": 2048},
        "parallel": {"pipeline_model_parallel_size": 7, "virtual_pipeline_model_parallel_size": 3},
    },
    "rotated in part": {
        "model": {
            "preset": "gpt3-13b",
            "seq_length": 2048,
            "position_embedding_type": "rope",
            "rotary_percent": 0.1,
        },
        "parallel": {"tensor_model_parallel_size": 4},
    },
}


@pytest.mark.parametrize("name", SPLIT)
def test_every_kind_of_layout_stays(name: str) -> None:
    fields = SPLIT[name]
    real = with_fields(SMALL, {"engine": "megatron-core", "batch": {"micro_batch_size": 1}, **fields})
    replicas = 8
    samples = 16 * replicas * real.parallel.pipeline_model_parallel_size
    real = real.model_copy(update={"batch": real.batch.model_copy(update={"global_batch_size": samples})})
    assert not layout_problems(real, replicas * size_of_replica(real))
    shrunk(real, replicas)


def test_hybrid_shards_stay_hybrid() -> None:
    real = with_fields(
        SMALL, {"parallel": {"strategy": "fsdp", "data_parallel_shard_size": 8}, "batch.global_batch_size": 64}
    )
    found = shrunk(real, 32)
    assert (found.ranks, found.experiment.parallel.data_parallel_shard_size) == (4, 2)


JEAN_ZAY = CONFIGS / "jean-zay/30b.yaml"


def test_what_becomes_of_jean_zays_30b() -> None:
    found = shrunk(load_experiment(JEAN_ZAY), 1)
    assert found.ranks == 4
    assert {it.field: it.values for it in found.changes} == {
        "model.num_layers": ("48", "4"),
        "model.hidden_size": ("7168", "64"),
        "model.num_attention_heads": ("32", "4"),
        "model.seq_length": ("1024", "64"),
        "parallel.tensor_model_parallel_size": ("4", "2"),
        "parallel.pipeline_model_parallel_size": ("16", "2"),
        "optimizer.lr_decay_iters": ("800", "19"),
        "train.train_iters": ("1000", "24"),
        "train.log_interval": ("10", "1"),
        "train.eval_interval": ("100", "16"),
        "train.eval_iters": ("10", "1"),
        "train.save_interval": ("500", "8"),
        "restart.max": ("0", "1"),
    }
    assert found.kept == {
        "engine": "megatron-core",
        "model.recompute_granularity": "full",
        "model.recompute_method": "uniform",
        "model.recompute_num_layers": "1",
        "parallel.strategy": "ddp",
        "batch.global_batch_size": "4",
        "data.data_path": "data/openwebtext-10k/meg-gpt2_text_document",
        "optimizer.lr_warmup_fraction": "0.01",
        "precision": "fp16",
    }
    assert found.omitted == {}


def test_a_machine_with_the_cores_keeps_the_layout() -> None:
    real = load_experiment(JEAN_ZAY)
    found = shrunk(real, 1, cores=64)
    assert (found.ranks, found.experiment.parallel) == (64, real.parallel)


def test_what_a_cpu_cannot_do_is_left_out_with_a_reason() -> None:
    fields = {
        "engine": "megatron-core",
        "precision": "bf16",
        "model": {
            "preset": "llama-3.1-8b",
            "transformer_impl": "transformer_engine",
            "fp8": "hybrid",
            "seq_length": 8192,
        },
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
        "train": {"train_iters": 100, "load": "runs/a/checkpoints", "checkpoint_folder": "/scratch/a", "tf32": True},
        "launch.master_port": 29500,
        "launch.launcher": "ssh",
    }
    found = shrunk(with_fields(SMALL, fields), 4)
    assert set(found.omitted) == {
        *("model.transformer_impl", "model.fp8", "parallel.tp_comm_overlap", "train.tf32", "train.load"),
        *("train.checkpoint_folder", "launch.launcher", "launch.master_port"),
    }
    assert not set(found.omitted) & ({it.field for it in found.changes} | found.kept.keys())


def test_options_of_deepspeed_stay_and_nvme_becomes_memory() -> None:
    offload = {"device": "nvme", "nvme_path": "/local_nvme"}
    zero = {"stage": 3, "reduce_bucket_size": 5e7, "offload_optimizer": offload, "offload_param": {"device": "cpu"}}
    own = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 16, "wall_clock_breakdown": True}
    base = {**SMALL, "batch": {"micro_batch_size": 16}}
    found = shrunk(with_fields(base, {"deepspeed": own, "parallel": {"zero_stage": 3}}), 16)
    assert found.experiment.deepspeed == {
        "zero_optimization": {
            "reduce_bucket_size": 5e7,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "wall_clock_breakdown": True,
    }
    assert "deepspeed" in found.omitted


@pytest.mark.parametrize(
    ("name", "ranks"), [("jean-zay/30b", 64), ("demo", 2), ("bench/gpt-1.3b", 2), ("megatron/gpt2-345m-3d", 4)]
)
def test_without_a_cluster_the_fewest_legal_ranks_are_assumed(name: str, ranks: int) -> None:
    experiment = load_experiment(CONFIGS / f"{name}.yaml")
    slots = assumed_slots(experiment)
    assert sum(map(len, slots.values())) == ranks
    assert assess(experiment, slots, name).plan is not None


def test_experts_over_replicas_need_as_many_slots() -> None:
    fields = {"engine": "megatron-core", "batch": {"micro_batch_size": 1}, **SPLIT["experts over replicas"]}
    assert sum(map(len, assumed_slots(with_fields(SMALL, fields)).values())) == 32
