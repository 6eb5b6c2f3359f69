"""A user's own DeepSpeed JSON: what becomes of each option, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import make_plan
from tridock.engines import cost_model_of
from tridock.engines.deepspeed import deepspeed_config
from tridock.errors import RequestError
from tridock.experiment import Experiment, dump_experiment, parse_experiment
from tridock.gpus import find_gpu
from tridock.layout.shape import LayoutShape
from tridock.plan.assess import assess
from tridock.plan.assumptions import Assumptions
from tridock.plan.memory import HostMemory

UPSTREAM = """{
  "train_batch_size": 48,
  "gradient_accumulation_steps": 3,
  "steps_per_print": 1,
  "zero_optimization": {
    "stage": 2, "allgather_partitions": true, "reduce_scatter": true,
    "allgather_bucket_size": 50000000, "reduce_bucket_size": 5e7, "overlap_comm": true
  },
  "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}},
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
  "wall_clock_breakdown": true,
  "zero_allow_untested_optimizer": false
}"""
"""The nine options of ds_zero_stage_2_config.json in DeepSpeed's Megatron example."""
BASE: dict[str, Any] = {
    "name": "a",
    "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 16},
    "batch": {"micro_batch_size": 4},
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 5},
}
RANKS = {"node-1": range(4)}


def experiment(deepspeed: object, **fields: Any) -> Experiment:
    return Experiment.model_validate({**BASE, **fields, "deepspeed": deepspeed})


def refused(deepspeed: object, **fields: Any) -> list[str]:
    with pytest.raises(RequestError) as caught:
        make_plan(experiment(deepspeed, **fields), RANKS, "e.yaml")
    return str(caught.value).splitlines()


def test_the_nine_options_of_upstreams_file() -> None:
    given = parse_experiment(json.dumps(BASE), "e.yaml", [f"deepspeed={UPSTREAM}"])
    assert (given.precision, given.parallel.zero_stage, given.batch.global_batch_size) == ("fp16", 2, 48)
    assert (given.optimizer.adam_beta1, given.optimizer.adam_beta2) == (0.9, 0.95)
    assert given.fp16.loss_scale_window == 500
    plan = make_plan(given, RANKS, "e.yaml")
    assert plan.accumulation_steps == 3
    assert deepspeed_config(given, plan.data_parallel_size) == {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "steps_per_print": 1,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 50_000_000,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50_000_000,
        },
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": False,
        "fp16": {
            "enabled": True,
            "loss_scale": 0.0,
            "initial_scale_power": 16,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    }


def test_the_json_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(UPSTREAM)
    given = parse_experiment(json.dumps(BASE | {"deepspeed": str(file)}), "e.yaml")
    assert given == parse_experiment(json.dumps(BASE), "e.yaml", [f"deepspeed={UPSTREAM}"])
    missing = str(tmp_path / "missing.json")
    with pytest.raises(RequestError, match=r"missing.json: .* a DeepSpeed JSON"):
        parse_experiment(json.dumps(BASE), "e.yaml", [f"deepspeed={missing}"])


def test_an_offload_takes_time_and_no_memory_of_the_gpu() -> None:
    """13B parameters fit on eight GPUs of 40 GB with the optimizer's states on their host only."""
    model = {"preset": "gpt3-13b", "seq_length": 2048, "checkpoint_activations": True}
    fields = {"model": model, "parallel": {"zero_stage": 2}, "batch": {"micro_batch_size": 1}}
    assumed = Assumptions(gpu=find_gpu("a100-40gb", "--gpu"))
    plain, offloaded = (
        assess(experiment(given, **fields), {"node-1": range(8)}, "e.yaml", assumed)
        for given in ({}, {"zero_optimization": {"offload_optimizer": CPU}})
    )
    assert [found.memory[0].fit for found in (plain, offloaded)] == ["no-fit", "fits"]
    assert offloaded.memory[0].offloaded_bytes == pytest.approx(18 * 12.9e9 / 8, rel=0.01)
    states = 8 * offloaded.memory[0].offloaded_bytes
    assert (plain.host_memory, offloaded.host_memory) == ({}, {"node-1": HostMemory(8, states, states)})
    assert str(offloaded.host_memory["node-1"]) == "8 ranks of a node need 216.9 GiB of its host's memory"
    assert plain.cost
    assert offloaded.cost
    estimates = [cost.estimate for cost in (plain.cost, offloaded.cost)]
    assert estimates[0].offload == 0.0
    # Adam: 30 bytes of each of the eighth at 38 GB/s, and the new weights, 2 bytes, at 25 GB/s.
    assert estimates[1].offload == pytest.approx(12.9e9 / 8 * (30 / 38e9 + 2 / 25e9), rel=0.01)


def test_a_runs_folder_reads_back_and_may_continue_with_fewer_replicas() -> None:
    given = parse_experiment(json.dumps(BASE), "e.yaml", [f"deepspeed={UPSTREAM}"]).resolved(4)
    again = parse_experiment(dump_experiment(given), "e.yaml")
    assert again == given
    assert make_plan(again, {"node-1": range(2)}, "e.yaml").accumulation_steps == 6


def test_what_the_experiment_says_otherwise_is_refused_at_once() -> None:
    found = refused(
        {
            "train_batch_size": 64,
            "gradient_accumulation_steps": 3,
            "zero_optimization": {"stage": 1},
            "fp16": {"enabled": True, "min_loss_scale": 2},
            "optimizer": {"type": "Lamb", "params": {"betas": [0.8, 0.9]}},
        },
        batch={"micro_batch_size": 4, "global_batch_size": 32},
        parallel={"zero_stage": 2},
        optimizer={"adam_beta2": 0.95},
        precision="bf16",
    )
    assert found == [
        "e.yaml: deepspeed.train_batch_size: is batch.global_batch_size, which is 32; got 64; leave one of the two out",
        "e.yaml: deepspeed.gradient_accumulation_steps: batch.global_batch_size 32 takes 2 on 4 replicas; got 3; "
        "set it to 48, or leave this out",
        "e.yaml: deepspeed.zero_optimization.stage: is parallel.zero_stage, which is 2; got 1; "
        "leave one of the two out",
        "e.yaml: deepspeed.fp16.enabled: sets the precision, which is bf16; got true; leave one of the two out",
        "e.yaml: deepspeed.fp16.min_loss_scale: is 1 in every engine; got 2; leave it out",
        "e.yaml: deepspeed.optimizer.type: is AdamW or Adam in every engine; got Lamb; leave it out",
        "e.yaml: deepspeed.optimizer.params.betas.1: is optimizer.adam_beta2, which is 0.95; got 0.9; "
        "leave one of the two out",
    ]


def test_what_does_not_reach_deepspeed_is_refused_with_the_reason() -> None:
    found = refused(
        {
            "scheduler": {"type": "WarmupLR"},
            "zero_optimization": {"cpu_offload": True, "overlap_com": True, "sub_group_size": "big"},
            "amp": {"enabled": False},
            "wall_clock_breakdown": 1,
        }
    )
    assert found == [
        "e.yaml: deepspeed.scheduler: the training loop has the learning rate, not DeepSpeed; "
        "got {'type': 'WarmupLR'}; leave it out, and set optimizer.lr_warmup_iters and lr_decay_style",
        "e.yaml: deepspeed.zero_optimization.cpu_offload: is an option of older versions; got True; "
        "write offload_optimizer: {device: cpu}",
        "e.yaml: deepspeed.zero_optimization.overlap_com: does not reach DeepSpeed; got True; leave it out",
        "e.yaml: deepspeed.zero_optimization.sub_group_size: must be a number; got 'big'; write one",
        "e.yaml: deepspeed.amp: does not reach DeepSpeed; got {'enabled': False}; leave it out",
        "e.yaml: deepspeed.wall_clock_breakdown: must be true or false; got 1; write one",
    ]


def test_what_hugging_face_leaves_to_the_program() -> None:
    auto = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1},
    }
    given = experiment(auto)
    assert make_plan(given, RANKS, "e.yaml").accumulation_steps == 1
    assert (given.precision, given.parallel.zero_stage) == ("bf16", 1)


def test_without_deepspeed_it_is_refused() -> None:
    assert refused({"wall_clock_breakdown": True}, parallel={"strategy": "ddp"}) == [
        'e.yaml: deepspeed: strategy ddp does not use DeepSpeed; got {"wall_clock_breakdown": true}; '
        "leave it out, or set parallel.strategy to zero"
    ]
    assert refused({"wall_clock_breakdown": True}, engine="megatron-core") == [
        'e.yaml: deepspeed: megatron-core runs without DeepSpeed; got {"wall_clock_breakdown": true}; leave it out'
    ]


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({}, 500_000_000),
        ({"reduce_bucket_size": 5e7}, 100_000_000),
        ({"overlap_comm": False}, 500_000_000),
        ({"overlap_comm": False, "reduce_bucket_size": 5e7}, 50_000_000),
    ],
)
def test_the_plan_knows_the_buckets(options: dict[str, Any], elements: int) -> None:
    given = experiment({"zero_optimization": {"stage": 2, **options}})
    costs = cost_model_of(given)
    states = costs.states(given, costs.parameters(given, 0), LayoutShape(data=4, accumulation=1, slots=4), "cuda")
    assert states.bucket == 2 * elements


CPU = {"device": "cpu"}


def test_offloads_that_do_not_work_are_refused() -> None:
    wrong = {
        "offload_optimizer": {"device": "disk", "fast_init": True, "pin_memory": 1},
        "offload_param": {**CPU, "max_in_cpu": 0},
    }
    assert refused({"zero_optimization": wrong}, parallel={"zero_stage": 2}) == [
        "e.yaml: deepspeed.zero_optimization.offload_optimizer.device: must be cpu, nvme or none; got 'disk'; "
        "write one",
        "e.yaml: deepspeed.zero_optimization.offload_optimizer.fast_init: does not reach DeepSpeed; got True; "
        "leave it out",
        "e.yaml: deepspeed.zero_optimization.offload_optimizer.pin_memory: must be true or false; got 1; write one",
        "e.yaml: deepspeed.zero_optimization.offload_param.max_in_cpu: is of device nvme; got 0; "
        "set device to nvme, or leave this out",
        "e.yaml: deepspeed.zero_optimization.offload_param: needs ZeRO stage 3; got parallel.zero_stage 2; "
        "set it to 3, or leave this out",
    ]
    on_nvme = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "nvme", "buffer_count": 3}}
    assert refused({"zero_optimization": on_nvme}) == [
        "e.yaml: deepspeed.zero_optimization.offload_optimizer.buffer_count: must be a whole number from 4; got 3; "
        "write one",
        "e.yaml: deepspeed.zero_optimization.offload_optimizer.nvme_path: must be an absolute path; got 'nvme'; "
        "write a folder on the NVMe of every node, such as /local_nvme",
        "e.yaml: deepspeed.zero_optimization.offload_optimizer: needs ZeRO stage 3 for device nvme; "
        "got parallel.zero_stage 2; set it to 3, or leave this out",
    ]
    assert refused({"zero_optimization": {"offload_optimizer": "cpu"}}) == [
        "e.yaml: deepspeed.zero_optimization.offload_optimizer: must be a mapping; got 'cpu'; write {device: cpu}"
    ]
    assert refused({"zero_optimization": {"offload_optimizer": CPU}}, parallel={"zero_stage": 0}) == [
        "e.yaml: deepspeed.zero_optimization.offload_optimizer: needs a ZeRO stage from 1 to 3; "
        "got parallel.zero_stage 0; set it to 1, 2 or 3, or leave this out"
    ]
    megatron = {"data": {"data_path": "data/x", "vocab_file": "v", "merge_file": "m"}, "precision": "fp16"}
    given = {"zero_optimization": {"stage": 1, "offload_optimizer": CPU}}
    assert refused(given, engine="megatron-deepspeed", **megatron) == [
        "e.yaml: deepspeed.zero_optimization: Megatron v1.1.5's Adam on the host ignores adam_beta1, adam_beta2 and "
        "adam_eps; got an offload; leave it out, or use engine torch"
    ]


def test_an_offload_reaches_deepspeed_with_torchs_adam() -> None:
    given = experiment({"zero_optimization": {"stage": 2, "offload_optimizer": CPU | {"pin_memory": False}}})
    found = deepspeed_config(given, 4)
    assert found["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert found["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in deepspeed_config(experiment({}), 4)


NVME = {"device": "nvme", "nvme_path": "/nvme"}


def test_states_on_nvme_reach_deepspeed() -> None:
    """The groups of 1e9 elements and the gathered weights that DeepSpeed has by default need too much memory."""
    zero = {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME | {"buffer_count": 9}}
    found = deepspeed_config(experiment({"zero_optimization": zero, "aio": {"queue_depth": 32}}), 4)
    assert found["zero_optimization"] == zero | {"sub_group_size": 10**8, "stage3_max_reuse_distance": 0}
    assert found["aio"] == {"queue_depth": 32}
    own = {"sub_group_size": 7, "stage3_max_reuse_distance": 8}
    assert deepspeed_config(experiment({"zero_optimization": zero | own}), 4)["zero_optimization"] == zero | own


def test_the_plan_knows_what_is_on_nvme() -> None:
    """Bytes of one of four ranks in bf16: its files, its locked buffers, and what each step reads and writes."""
    shape = LayoutShape(data=4, accumulation=2, slots=4)
    model = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 64}

    def on_nvme(**zero: Any) -> Experiment:
        return experiment({"zero_optimization": {"stage": 3, **zero}}, model=model, precision="bf16")

    plain = on_nvme()
    costs = cost_model_of(plain)
    weights = costs.parameters(plain, 0)
    owned, widest = weights.total // 4, weights.embedding // 4
    optimizer = on_nvme(offload_optimizer=NVME, sub_group_size=10**6)
    states, cpu = costs.states(optimizer, weights, shape, "cuda"), costs.states(plain, weights, shape, "cuda")
    assert (states.swapped, states.swap_buffers) == (12 * owned, 4 * owned)
    assert (states.offloaded, states.optimizer, states.gradients) == (0, 0, 0)
    assert states.locked == 4 * 4 * min(owned, 10**6 + widest) == states.host_buffers - 2 * owned
    assert states.saved == cpu.saved
    assert costs.copied_bytes(optimizer, weights, states) == 0 < costs.copied_bytes(plain, weights, cpu)
    assert costs.host_work(optimizer, shape).nvme == 32 * owned
    kept = on_nvme(offload_param=NVME, sub_group_size=10**6)
    assert costs.states(kept, weights, shape, "cuda").swapped == 0  # of fewer than max_in_cpu
    both = on_nvme(offload_optimizer=NVME, offload_param=NVME | {"max_in_cpu": owned // 2}, sub_group_size=10**6)
    moved = costs.states(both, weights, shape, "cuda")
    assert moved.swapped - states.swapped == 2 * (owned - owned // 2)
    assert moved.offloaded == 2 * (owned // 2)
    assert costs.host_work(both, shape).nvme == 32 * owned + 5 * 2 * (owned - owned // 2)
    assert (
        costs.states(on_nvme(offload_optimizer=NVME), weights, LayoutShape(1000, 1, 4), "cuda").swapped == 0
    )  # < 1 MiB


def test_nvme_takes_time_and_little_memory_of_the_host() -> None:
    """13B parameters on eight GPUs: 32 bytes of each move in a step, at the rate that the plan assumes."""
    model = {"preset": "gpt3-13b", "seq_length": 2048, "checkpoint_activations": True}
    fields = {"model": model, "batch": {"micro_batch_size": 1}, "precision": "bf16"}
    assumed = Assumptions(gpu=find_gpu("a100-40gb", "--gpu"))
    on_host, on_nvme = (
        assess(
            experiment({"zero_optimization": {"stage": 3, "offload_optimizer": device}}, **fields),
            {"node-1": range(8)},
            "e.yaml",
            assumed,
        )
        for device in (CPU, NVME)
    )
    assert on_nvme.memory[0].terms == on_host.memory[0].terms
    assert str(on_nvme.host_memory["node-1"]) == (
        "8 ranks of a node need 39.9 GiB of its host's memory, and 192.8 GiB on NVMe"
    )
    assert on_nvme.document()["memory"]["stages"][0]["nvme_bytes"] == on_nvme.host_memory["node-1"].nvme // 8
    assert on_host.cost
    assert on_nvme.cost
    assert on_host.cost.estimate
    assert on_nvme.cost.estimate
    longer = on_nvme.cost.estimate.offload - on_host.cost.estimate.offload
    assert longer == pytest.approx(32 * 12.94e9 / 8 / 1.6e9, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "parts", "on_gpu", "on_host"),
    [
        (1, ("optimizer",), 2.0, 4.5),
        (2, ("optimizer",), 2.0, 4.5),
        (3, ("optimizer",), 0.5, 4.5),
        (3, ("optimizer", "param"), 0.0, 5.0),
        (3, ("param",), 3.5, 0.5),
    ],
)
def test_the_plan_knows_where_the_states_are(stage: int, parts: tuple[str, ...], on_gpu: float, on_host: float) -> None:
    """Bytes a parameter on 4 replicas in bf16, of what lasts. On a CPU rank host and device are one."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | {f"offload_{part}": CPU for part in parts}
    given = experiment({"zero_optimization": zero})
    costs, shape = cost_model_of(given), LayoutShape(data=4, accumulation=1, slots=4)
    weights = costs.parameters(given, 0)
    small = 2 * weights.final_norm  # which stays whole
    states = costs.states(given, weights, shape, "cuda")
    assert (states.persistent - (small if stage == 3 else 0)) / weights.total == pytest.approx(on_gpu, abs=1e-2)
    assert (states.offloaded + states.host_buffers) / weights.total == pytest.approx(on_host, abs=1e-2)
    plain = experiment({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})
    assert states.saved == costs.states(plain, weights, shape, "cuda").saved
    assert costs.states(given, weights, shape, "cpu") == costs.states(plain, weights, shape, "cpu")
