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
    Parameters,
    Shape,
    in_flight,
    layer_parameters,
    layers_of_stage,
    recomputed_layers,
)

_SUM_BYTES: Final = 4


def is_sharded(experiment: Experiment) -> bool:
    """Returns whether FSDP2, tensor parallelism or a pipeline partitions the model or its states."""
    parallel = experiment.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size > 1
    return split or parallel.strategy == "fsdp"


def shards_of(experiment: Experiment, replicas: int) -> int:
    """Returns the number of ranks that together hold one copy of the states."""
    return (experiment.parallel.data_parallel_shard_size or replicas) if experiment.parallel.strategy == "fsdp" else 1


def scatters_each(experiment: Experiment, replicas: int) -> bool:
    """Returns whether each micro-batch's gradients are scattered, instead of their sum once a step."""
    parallel = experiment.parallel
    once = parallel.reduce_gradients_once or parallel.pipeline_model_parallel_size > 1
    return shards_of(experiment, replicas) > 1 and not once


def summed_up(experiment: Experiment, stage: int, shape: Shape, weights: Parameters, sizes: Sizes) -> float:
    """Returns the bytes in addition to those of a rank of ``stage`` when its very first backward pass begins."""
    parallel, accumulation = experiment.parallel, shape.accumulation
    piped, virtual = parallel.pipeline_model_parallel_size > 1, parallel.virtual_pipeline_model_parallel_size
    if not piped and accumulation == 1:
        return 0.0  # each layer's gradients are scattered at once, and take less room than the activations freed
    if scatters_each(experiment, shape.data):
        return _SUM_BYTES * weights.total / shards_of(experiment, shape.data)  # from the second micro-batch on
    layer, short = layer_parameters(experiment), FORMAT_BYTES[experiment.precision] if piped else 0
    runs, passes_in_flight = accumulation * virtual, in_flight(experiment, stage, accumulation)
    own = layers_of_stage(experiment, stage) / virtual  # layers of a virtual stage
    run = kept_bytes(experiment, stage, sizes) / virtual
    whole, freed, gathered = _SUM_BYTES * weights.total, run * (own - 1) / own, short * (own - 1) * layer
    # An interleaved pipeline begins with the backward passes of one virtual stage, on the last stage that with the
    # table.
    is_last = stage == parallel.pipeline_model_parallel_size - 1
    ends = weights.total - weights.layers if is_last else 0
    is_whole = virtual == 1 or runs - passes_in_flight > (virtual - 1) * parallel.pipeline_model_parallel_size
    summed = whole if is_whole else _SUM_BYTES * (own * layer + ends)
    others = short * (virtual - 1) * own * layer if is_whole else 0.0  # gathered since their backward passes
    moments = [0.0, _SUM_BYTES * (own - 1) * layer + gathered - freed]
    if runs > passes_in_flight:  # all gradients are allocated, and the pipeline is still full
        moments += [summed + others, summed + others + gathered - freed]
    if passes_in_flight > 1:  # the next virtual stage's, with the first one's gradients
        moments.append(summed - run + gathered + (0.0 if virtual == 1 else short * layer))
    if piped and stage == 0:
        # The embeddings' gradients come last; DTensor allocates the table's for all rows, on each rank, in both
        # formats.
        table = parallel.tensor_model_parallel_size * weights.embedding
        made = _SUM_BYTES * (table - weights.embedding)
        made += short * (table + weights.positions) if short < _SUM_BYTES else 0
        at_work = backward_bytes(experiment, sizes, 0)
        moments.append(summed - run + short * own * layer + made - at_work)
    return max(moments)


def scattered(experiment: Experiment, stage: int, shape: Shape, weights: Parameters, sizes: Sizes) -> float:
    """Returns the peak bytes while gradients are scattered, without the gathered embeddings."""
    layer = layer_parameters(experiment)
    short, ends = FORMAT_BYTES[experiment.precision], weights.total - weights.layers
    if experiment.parallel.pipeline_model_parallel_size > 1:  # when all activations are freed
        return _SUM_BYTES * weights.total + short * weights.layers + _SUM_BYTES * max(layer, ends)
    shards = shards_of(experiment, shape.data)
    layers, kept = layers_of_stage(experiment, stage), kept_bytes(experiment, stage, sizes)
    small = 4 * sizes.between + 3 * sizes.heads
    at_work = backward_bytes(experiment, sizes, recomputed_layers(experiment, layers)) - sizes.gathered
    most = 0.0
    for done in {1, min(2, layers), layers}:  # layers done, including the current one
        before = _SUM_BYTES * layer if done > 1 else 0
        ahead = short * layer if shards > 1 and done < layers else 0
        # One micro-batch's gradients are in the short format. Those of several are unsharded, except the scattered
        # ones; the last micro-batch's for the table are accumulated at its end.
        each = scatters_each(experiment, shape.data)
        single = shape.accumulation == 1 or each
        sums = short * ends if single else _SUM_BYTES * (weights.total - (done - 1) * layer) + short * weights.embedding
        scattered_before = _SUM_BYTES * weights.total / shards if each and shape.accumulation > 1 else 0.0
        held = kept * (layers - done) / layers + before + ahead + sums + _SUM_BYTES * layer * done / shards
        held += max(0.0, scattered_before - _SUM_BYTES * layer * (done - 1) / shards)
        complete = held - _SUM_BYTES * layer / shards + short * layer * (2 if single else 1) + small
        # When a later layer begins, the one before is being scattered and the next one is gathered.
        begun = (
            held - _SUM_BYTES * layer / shards + kept / layers + short * layer + at_work
            if done > 1 and shards > 1
            else 0.0
        )
        sent = held + _SUM_BYTES * layer - (0 if single else _SUM_BYTES * layer)
        sent += _SUM_BYTES * layer - before if sizes.device == "cpu" else 0  # Gloo sends a copy of them
        most = max(most, begun, complete, sent)
        if done == layers and (tensor := experiment.parallel.tensor_model_parallel_size) > 1:
            # The table's gradient comes last: of all rows, of this rank's, and the sum over both uses of the table.
            most = max(most, held + short * weights.embedding * (tensor + 2))
    return most
