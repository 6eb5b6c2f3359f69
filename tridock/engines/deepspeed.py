"""DeepSpeed's ZeRO, shared by engines ``torch`` and ``megatron-deepspeed``: configuration, memory, traffic. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

from tridock.engines.deepspeed_options import PASSED
from tridock.engines.fields import as_yaml
from tridock.engines.offload import Offload, nvme_config, zero_option
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.deepspeed_json import options
from tridock.experiment.parameters import layer_weights
from tridock.layout.shape import FORMAT_BYTES, Device, LayoutShape, Parameters, States
from tridock.layout.traffic import Sent, all_gather, all_reduce, backward_pass


def deepspeed_config(experiment: Experiment, data_parallel_size: int) -> dict[str, Any]:
    """Returns the run's ``ds_config.json``. The training loop owns the optimizer and the learning rate.

    A ``global_batch_size``, if given, must be a multiple of ``micro_batch_size * data_parallel_size``; the plan
    checks it.
    """
    batch, fp16 = experiment.batch, experiment.fp16
    config: dict[str, Any] = {
        "train_batch_size": batch.samples_per_step(data_parallel_size),
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation_steps(data_parallel_size),
        "gradient_clipping": experiment.optimizer.clip_grad,
        "zero_optimization": {"stage": experiment.parallel.zero_stage, **nvme_config(experiment)},
    }
    if overlaps_gradients(experiment, data_parallel_size) and experiment.parallel.zero_stage < 3:
        # One bucket fills while the other is sent: two of half the size take the memory of one. Stage 3 does so by
        # itself, with separate memory.
        config["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": _BUCKET // 2}
    if Offload.of(experiment).optimizer:
        # torch's fused AdamW is as fast on a CPU as DeepSpeed's own (docs/results.md), and needs no compiler.
        config["zero_force_ds_cpu_optimizer"] = False
    for path, value in options(experiment.deepspeed):
        if path in PASSED:
            section, _, name = path.rpartition(".")
            within = config[section] if section else config
            # DeepSpeed requires integers; YAML and JSON write them as 5e8.
            within[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    if experiment.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if experiment.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": fp16.loss_scale,
            "initial_scale_power": fp16.initial_scale_power,
            "loss_scale_window": fp16.loss_scale_window,
            "hysteresis": fp16.hysteresis,
            "min_loss_scale": 1,
        }
    return config


def overlaps_gradients(experiment: Experiment, data_parallel_size: int) -> bool:
    """Whether gradients are sent during the backward pass. DeepSpeed's pipelines and ZeRO stage 0 cannot do so."""
    parallel = experiment.parallel
    if not zero_option(experiment, "overlap_comm", True):
        return False
    return parallel.zero_stage > 0 and parallel.pipeline_model_parallel_size == 1 and data_parallel_size > 1


_BUCKET: Final = 500_000_000
"""Elements of DeepSpeed's reduce_bucket_size by default."""
_LIVE: Final = 1_000_000_000
_PERSISTENT: Final = 100_000
REUSED: Final = 1_000_000_000
"""stage3_max_reuse_distance: weights stay gathered if they are used again before this many others."""


def _buckets(experiment: Experiment, replicas: int) -> tuple[int, int]:
    """Returns the number of gradient buckets, two if one fills while the other is sent, and the elements of each."""
    # A pipeline always has two.
    fills_another = overlaps_gradients(experiment, replicas) and experiment.parallel.zero_stage < 3
    number = 2 if experiment.parallel.pipeline_model_parallel_size > 1 or fills_another else 1
    return number, zero_option(experiment, "reduce_bucket_size", _BUCKET // 2 if fills_another else _BUCKET)


def zero_stage_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a ZeRO stage, or DeepSpeed options, without ZeRO."""
    parallel = experiment.parallel
    if parallel.strategy != "zero" and experiment.deepspeed:
        todo = "leave it out, or set parallel.strategy to zero"
        yield Problem(
            "deepspeed",
            f"strategy {parallel.strategy} does not use DeepSpeed",
            as_yaml(experiment.deepspeed),
            todo,
            ("{}",),
        )
    if parallel.strategy == "ddp" and parallel.zero_stage != 0:
        what, todo = "strategy ddp keeps everything on every rank", "set it to 0, or strategy to zero"
        yield Problem("parallel.zero_stage", what, str(parallel.zero_stage), todo, (0,))


def zero_states(experiment: Experiment, weights: Parameters, shape: LayoutShape, device: Device) -> States:
    """Returns the states that a rank with these weights keeps, by ZeRO stage. On CPUs host and device are one."""
    found = _on_device(experiment, weights, shape)
    if device == "cpu":
        return found
    owned, widest = (-(-size // shape.data) for size in (weights.total, _widest(experiment, weights)))
    return Offload.of(experiment).states(found, experiment, owned, shape, widest)


def _on_device(experiment: Experiment, weights: Parameters, shape: LayoutShape) -> States:
    """Returns the states if nothing is offloaded."""
    short, stage, count = FORMAT_BYTES[experiment.precision], experiment.parallel.zero_stage, weights.total
    replicas, widest = shape.data, _widest(experiment, weights)
    owned = -(-count // replicas)
    if stage == 0:
        master = 4 if short == 2 else 0
        # Gradients are sent as one flat tensor of 5e8 elements and up to a tensor more.
        sent = short * min(count, _BUCKET + widest) if replicas > 1 else 0
        # In a short format DeepSpeed allocates Adam's states with a step.
        startup = (short + master + 8 + short + master) * count if master else short * count
        workspace = max(master * count, sent)
        return States(short * count, 0, (master + 8) * count, short * count, workspace=workspace, startup=startup)
    number, elements = _buckets(experiment, replicas)
    optimizer, bucket = 12 * owned, short * number * elements
    if stage < 3:
        reduced = short * _reduced_elements(experiment, weights, replicas)
        step_gradients = short * count if stage == 1 else reduced
        startup = short * count + 8 * owned  # the master weights, and their gradients
        # The token table's gradient is the last of a backward pass. Of a table that is also the output layer there are
        # two and their sum. A pipeline reduces gradients after its backward passes.
        # Stage 1 counts one of them already, unless earlier micro-batches have one too.
        piped = experiment.parallel.pipeline_model_parallel_size > 1
        made = (1 if weights.head else 3) - (stage == 1 and shape.accumulation == 1)
        tables = 0 if piped else short * weights.embedding * made
        # By then a full bucket's gradients lie where they stay, besides their own tensors or those of micro-batches
        # before.
        stays = count - weights.embedding > elements and (stage == 1 or shape.accumulation > 1) and replicas > 1
        workspace = max((4 + short) * owned, bucket + tables + (reduced if stays else 0))
        return States(short * count, 0, optimizer, step_gradients, bucket, workspace=workspace, startup=startup)
    small = sum(_small_tensors(experiment, weights))
    kept = small + owned if replicas > 1 else count
    gathered = short * min(count - small, _gathered_elements(experiment, weights)) if replicas > 1 else 0
    together = zero_option(experiment, "stage3_prefetch_bucket_size", _BUCKET // 10)
    # Weights that are gathered together are copied out of one buffer, which is there until the last of them is used.
    prefetch = short * min(count - small, together + widest) if replicas > 1 and together else 0
    # Of a group of 1e9 weights the gradients are made flat, in their format, and then converted.
    workspace = (4 + short % 4) * min(owned, 2 * _BUCKET)
    # zero.Init partitions each tensor once it is drawn. Beside the master weights and gradients, the optimizer gathers
    # one tensor after another (create_reduce_and_remove_grad_hooks in stage3.py).
    startup = (2 * short + 4) * owned + short * widest + bucket
    return States(short * kept, short * owned, optimizer, 0, bucket, gathered, workspace, startup, prefetch=prefetch)


def _reduced_elements(experiment: Experiment, weights: Parameters, replicas: int) -> int:
    """Returns the most elements of gradients that a rank keeps in ZeRO 1 and 2: all tensors of which it owns a part."""
    tensor = experiment.parallel.tensor_model_parallel_size
    layer = tuple(weight.share(tensor) for weight in layer_weights(experiment.model) if weight.is_matrix)
    layers = weights.layers // sum(weight.share(tensor) for weight in layer_weights(experiment.model))
    return _fullest_part((weights.embedding, weights.positions, *layer * layers, weights.head), replicas)


@lru_cache(maxsize=256)
def _fullest_part(sizes: tuple[int, ...], parts: int) -> int:
    """Returns the most elements of the tensors that one of equal parts touches, if tensors of these sizes are flat."""
    ends = [0, *accumulate(sizes)]
    part = -(-ends[-1] // parts)
    return max(
        ends[bisect_left(ends, min(start + part, ends[-1]))] - ends[bisect_right(ends, start) - 1]
        for start in range(0, ends[-1], part)
    )


def _gathered_elements(experiment: Experiment, weights: Parameters) -> int:
    """Returns the most elements that ZeRO 3 has gathered, besides a rank's own part of all.

    Each module also gathers ahead, through the forward passes into the backward passes, until
    ``stage3_max_live_parameters`` are there (``partitioned_param_coordinator.py``). The last tensor may exceed that.
    """
    return zero_option(experiment, "stage3_max_live_parameters", _LIVE) + _widest(experiment, weights)


def _widest(experiment: Experiment, weights: Parameters) -> int:
    """Returns the elements of the largest tensor."""
    tensor = experiment.parallel.tensor_model_parallel_size
    return max(weights.embedding, weights.head, *(weight.share(tensor) for weight in layer_weights(experiment.model)))


def _small_tensors(experiment: Experiment, weights: Parameters) -> Iterator[int]:
    """Yields the elements of each tensor that ZeRO 3 does not partition."""
    model, tensor = experiment.model, experiment.parallel.tensor_model_parallel_size
    layer = [weight.share(tensor) for weight in layer_weights(model)]
    tables = [weights.embedding, weights.positions, weights.head]
    least = zero_option(experiment, "stage3_param_persistence_threshold", _PERSISTENT)
    yield from (size * model.num_layers for size in layer if size <= least)
    yield from (size for size in tables if size <= least)
    yield weights.final_norm


def zero_sent(experiment: Experiment, shape: LayoutShape, weights: int, others: Sent) -> Sent:
    """Adds to ``others`` what a replica sends to reduce the gradients and to gather the weights."""
    stage, short, size = experiment.parallel.zero_stage, FORMAT_BYTES[experiment.precision], shape.data
    gradients, gathered = all_reduce(size, short * weights), all_gather(size, short * weights)
    overlaps = overlaps_gradients(experiment, size)
    if stage == 0:
        return replace(others, gradient_bytes=gradients)
    # Stages 1 and 2 all-reduce gradients, and each rank keeps its part; stage 2 does so after each micro batch.
    if stage < 3:
        passes = shape.accumulation if stage == 2 else 1
        volume = gradients * passes + gathered
        overlapped = gradients * passes / volume if overlaps else 0.0
        return replace(
            others, gradient_bytes=volume, overlapped=overlapped, computing=backward_pass(shape.accumulation // passes)
        )
    # Stage 3 gathers the weights for each micro batch, again for the backward pass if that is far off, and
    # scatters the gradients. Tensors of fewer than 1e5 elements stay; here they count as if they did not.
    assumed = nvme_config(experiment).get("stage3_max_reuse_distance", REUSED)
    reused = zero_option(experiment, "stage3_max_reuse_distance", assumed)
    again = all_gather(size, short * max(0, weights - reused // 2))
    return replace(
        others,
        gradient_bytes=(2 * gathered + again) * shape.accumulation,
        overlapped=float(overlaps),
        computing=1.0,
        messages=3 * experiment.model.num_layers * shape.accumulation,
    )
