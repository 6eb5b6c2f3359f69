"""What engine ``torch`` shards with FSDP2, and the memory of a step's gradients.

Gradients are scattered after each micro-batch, or accumulated first (:func:`scatters_each`): then they are unsharded on
every rank, in fp32, and are allocated layer by layer as activations are freed. In a pipeline torch keeps a stage's
layers gathered from their first backward pass until the next micro-batch's forward pass. The peak is in the first or
the last layer's backward pass of some micro-batch, or in a backward pass that scatters a layer's gradients: until then
torch keeps the buffer of the previous layer, and has already gathered the next one.
"""

from typing import Final

from tridock.experiment import Experiment
from tridock.layout.activations import Sizes, backward_bytes, kept_bytes
from tridock.layout.shape import (
    FORMAT_BYTES,
    LayoutShape,
    Parameters,
    in_flight,
    layer_parameters,
    layers_of_stage,
    recomputed_layers,
)

_SUM_BYTES: Final = 4


def is_sharded(experiment: Experiment) -> bool:
    """Returns whether FSDP2, tensor parallelism or a pipeline partitions the model or its states."""
    parallel = experiment.parallel
    return parallel.splits_model or parallel.strategy == "fsdp"


def shards_of(experiment: Experiment, replicas: int) -> int:
    """Returns the number of ranks that together hold one copy of the states."""
    return (experiment.parallel.data_parallel_shard_size or replicas) if experiment.parallel.strategy == "fsdp" else 1


def scatters_each(experiment: Experiment, replicas: int) -> bool:
    """Returns whether each micro-batch's gradients are scatter_peak, instead of their sum once a step."""
    parallel = experiment.parallel
    once = parallel.reduce_gradients_once or parallel.pipeline_model_parallel_size > 1
    return shards_of(experiment, replicas) > 1 and not once


def accumulation_peak(
    experiment: Experiment, stage: int, shape: LayoutShape, weights: Parameters, sizes: Sizes, head: float
) -> float:
    """Returns the peak bytes of accumulated gradients, beyond the rank's memory when its first backward pass begins.
    ``head``: bytes of that memory that only the loss takes, and not the layers' backward passes."""
    parallel, accumulation = experiment.parallel, shape.accumulation
    piped, virtual = parallel.pipeline_model_parallel_size > 1, parallel.virtual_pipeline_model_parallel_size
    if not piped and accumulation == 1:
        return 0.0  # each layer's gradients are scattered at once, and take less room than the activations freed
    if scatters_each(experiment, shape.data):
        return _SUM_BYTES * weights.total / shards_of(experiment, shape.data)  # from the second micro-batch on
    layer, short = layer_parameters(experiment), FORMAT_BYTES[experiment.precision] if piped else 0
    passes, passes_in_flight = accumulation * virtual, in_flight(experiment, stage, accumulation)
    layers = layers_of_stage(experiment, stage) / virtual  # layers of a virtual stage
    pass_bytes = kept_bytes(experiment, stage, sizes) / virtual
    # DTensor makes the token table's gradient with all rows on each tensor parallel rank, and it is accumulated so; the
    # sum with an output layer's, which is the same table, has this rank's rows.
    is_tied = not piped and weights.head == 0
    other_rows = 0 if is_tied else _SUM_BYTES * (parallel.tensor_model_parallel_size - 1) * weights.embedding
    all_gradients, gathered = _SUM_BYTES * weights.total + other_rows, short * (layers - 1) * layer
    freed = pass_bytes * (layers - 1) / layers
    # An interleaved pipeline begins with the backward passes of one virtual stage, on the last stage that with the
    # table.
    is_last = stage == parallel.pipeline_model_parallel_size - 1
    outside_layers = weights.total - weights.layers if is_last else 0
    all_allocated = virtual == 1 or passes - passes_in_flight > (virtual - 1) * parallel.pipeline_model_parallel_size
    accumulated = all_gradients if all_allocated else _SUM_BYTES * (layers * layer + outside_layers)
    other_stages = short * (virtual - 1) * layers * layer if all_allocated else 0.0  # still gathered
    peaks = [0.0, _SUM_BYTES * (layers - 1) * layer + gathered - freed - head]
    sent = _sent_bytes(experiment, stage, passes - passes_in_flight, sizes) if piped else 0.0
    if passes > passes_in_flight:  # all gradients are allocated, and the pipeline is still full
        full = accumulated + other_stages + sent
        peaks += [full, full + gathered - freed - head]
    if passes_in_flight > 1:  # the next virtual stage's, with the first one's gradients
        output = 0.0 if is_last else sizes.between  # which it has sent
        peaks.append(accumulated - pass_bytes - output + gathered + (0.0 if virtual == 1 else short * layer))
    if piped and stage == 0:
        # The embeddings' gradients come last, the table's with all rows in both formats.
        table = parallel.tensor_model_parallel_size * weights.embedding
        copies = 0 if all_allocated else other_rows
        copies += short * (table + weights.positions) if short < _SUM_BYTES else 0
        in_backward = backward_bytes(experiment, sizes, 0)
        peaks.append(accumulated - pass_bytes + short * layers * layer + copies - in_backward)
    return max(peaks)


def _sent_bytes(experiment: Experiment, stage: int, done: int, sizes: Sizes) -> float:
    """Returns the bytes of outputs and input gradients that a rank has sent and still holds, after ``done`` backward
    passes with a full pipeline (``torch.distributed.pipelining.schedules``).

    1F1B sends an input gradient with the next forward pass, and keeps it until the next backward pass ends
    (``bwd_sends``); the output of the warm-up's last pass but one to the end of the steady state (``send_work``). An
    interleaved schedule waits for all its messages at the end of the step (``send_ops``). Until then Gloo's messages
    keep their tensors; NCCL's free theirs when they are sent.
    """
    parallel, on_gloo = experiment.parallel, sizes.device == "cpu"
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if done < 1 or parallel.pipeline_schedule == "gpipe":
        return 0.0
    if virtual == 1:
        warm_up = stages - stage
        return ((stage > 0) + (on_gloo and 1 < warm_up <= done + 1)) * sizes.between
    if not on_gloo:
        return 0.0
    # Backward passes begin with the last virtual stage, a pipeline's number of micro-batches each.
    finished = [virtual - 1 - number // stages % virtual for number in range(done)]
    outputs = sum(stage < stages - 1 or one < virtual - 1 for one in finished)
    return (outputs + sum(stage > 0 or one > 0 for one in finished)) * sizes.between


def scatter_peak(experiment: Experiment, stage: int, shape: LayoutShape, weights: Parameters, sizes: Sizes) -> float:
    """Returns the peak bytes while gradients are scatter_peak, without the gathered embeddings."""
    layer = layer_parameters(experiment)
    short, outside_layers = FORMAT_BYTES[experiment.precision], weights.total - weights.layers
    if experiment.parallel.pipeline_model_parallel_size > 1:  # when all activations are freed
        return _SUM_BYTES * weights.total + short * weights.layers + _SUM_BYTES * max(layer, outside_layers)
    shards = shards_of(experiment, shape.data)
    layers, kept = layers_of_stage(experiment, stage), kept_bytes(experiment, stage, sizes)
    hidden_states = 4 * sizes.between + 3 * sizes.heads
    in_backward = backward_bytes(experiment, sizes, recomputed_layers(experiment, layers)) - sizes.gathered
    peak = 0.0
    for done in {1, min(2, layers), layers}:  # layers done, including the current one
        previous = _SUM_BYTES * layer if done > 1 else 0
        ahead = short * layer if shards > 1 and done < layers else 0
        # One micro-batch's gradients are in the short format. Those of several are unsharded, except the scattered
        # ones; the last micro-batch's for the table are accumulated at its end.
        scatters = scatters_each(experiment, shape.data)
        single = shape.accumulation == 1 or scatters
        unscattered = short * outside_layers
        if not single:
            unscattered = _SUM_BYTES * (weights.total - (done - 1) * layer) + short * weights.embedding
        scattered_before = _SUM_BYTES * weights.total / shards if scatters and shape.accumulation > 1 else 0.0
        kept_now = kept * (layers - done) / layers + previous + ahead + unscattered + _SUM_BYTES * layer * done / shards
        kept_now += max(0.0, scattered_before - _SUM_BYTES * layer * (done - 1) / shards)
        layer_ends = kept_now - _SUM_BYTES * layer / shards + short * layer * (2 if single else 1) + hidden_states
        # When a later layer begins, the one before is being scattered and the next one is gathered.
        layer_begins = (
            kept_now - _SUM_BYTES * layer / shards + kept / layers + short * layer + in_backward
            if done > 1 and shards > 1
            else 0.0
        )
        in_scatter = kept_now + _SUM_BYTES * layer - (0 if single else _SUM_BYTES * layer)
        in_scatter += _SUM_BYTES * layer - previous if sizes.device == "cpu" else 0  # Gloo sends a copy of them
        peak = max(peak, layer_begins, layer_ends, in_scatter)
        if done == layers and (tensor := experiment.parallel.tensor_model_parallel_size) > 1:
            # The table's gradient comes last: of all rows, of this rank's, and the sum over both uses of the table.
            peak = max(peak, kept_now + short * weights.embedding * (tensor + 2))
    return peak
