"""How megatron-core distributes layers over pipeline stages: what it refuses, and the numbers for unequal stages. Pure.

The first and the last stage may have their own numbers of layers; those in between have equally many. With an
interleaved schedule each number is a multiple of the model chunks of a stage.
"""

import math
from collections.abc import Iterator
from typing import Final

from tridock.engines.rules import Choice
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.parameters import head_flops_per_token, layer_flops_per_token
from tridock.layout.shape import layers_of_stage, unlike_stages, vocab_size
from tridock.layout.split import around, divisors, either, must_divide, nearest_multiple

FIRST: Final = "parallel.decoder_first_pipeline_num_layers"
LAST: Final = "parallel.decoder_last_pipeline_num_layers"
VIRTUAL: Final = "parallel.virtual_pipeline_model_parallel_size"


def own_numbers(experiment: Experiment) -> dict[str, int]:
    """Returns the numbers of layers that the experiment gives to the first and to the last stage, by field."""
    parallel = experiment.parallel
    given = {FIRST: parallel.decoder_first_pipeline_num_layers, LAST: parallel.decoder_last_pipeline_num_layers}
    return {path: number for path, number in given.items() if number is not None}


def problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields layers that the stages cannot have, regardless of the interleaving."""
    layers, parallel = experiment.model.num_layers, experiment.parallel
    stages, own = parallel.pipeline_model_parallel_size, own_numbers(experiment)
    if own and stages == 1:
        yield from _without_pipeline(own, layers)
    elif own:
        yield from _unequal(own, layers, stages)
    elif layers % stages:
        fitting = nearest_multiple(stages * parallel.virtual_pipeline_model_parallel_size, layers)
        where, more = "parallel.pipeline_model_parallel_size", f", or num_layers {fitting}"
        yield must_divide(where, stages, layers, f"num_layers {layers}", more)


def virtual_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a number of model chunks that the stages' layers cannot be divided into."""
    parallel = experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    own = own_numbers(experiment)
    if virtual == 1:
        return
    if stages == 1:
        todo = "leave it out, or set pipeline_model_parallel_size to 2 or more"
        yield Problem(VIRTUAL, "there is no pipeline to interleave", str(virtual), todo, (1,))
    elif any(problems(experiment)):
        return
    elif stages == 2 and len(own) == 2:
        # get_transformer_layer_offset divides by the number of stages in between (0.16.1).
        what = "megatron-core derives it from the first stage's if it interleaves two stages"
        yield Problem(LAST, what, str(own[LAST]), "leave it out", ("null",))
    elif (common := math.gcd(*layers_of_stages(experiment))) % virtual:
        yield must_divide(VIRTUAL, virtual, common, of_a_stage(layers_of_stages(experiment)))


def layers_of_stages(experiment: Experiment) -> tuple[int, ...]:
    """Returns the different numbers of layers of the stages, of the first stages first."""
    return tuple(dict.fromkeys(layers_of_stage(experiment, stage) for stage in unlike_stages(experiment)))


def of_a_stage(numbers: tuple[int, ...]) -> str:
    """``the 12 layers of a stage``."""
    if len(numbers) == 1:
        return f"the {numbers[0]} layers of a stage"
    return f"the layers of each stage: {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def stage_choices(experiment: Experiment, stages: int) -> Iterator[Choice]:
    """Yields the ways to distribute the layers that the search tries: for every number of model chunks equal stages,
    and unequal ones if those are faster; and the experiment's own numbers."""
    model, parallel, equal = experiment.model, experiment.parallel, {FIRST: None, LAST: None}
    if stages == 1 or model.is_vision:
        yield {VIRTUAL: 1, **equal}
        return
    head = head_flops_per_token(model, vocab_size(experiment)) / layer_flops_per_token(model)
    found: list[Choice] = []
    for virtual in divisors(model.num_layers):
        if model.num_layers % (stages * virtual) == 0:
            found.append({VIRTUAL: virtual, **equal})
        if (unequal := _unequal_choice(model.num_layers, stages, virtual, head)) is not None:
            found.append({VIRTUAL: virtual, **unequal})
    if own_numbers(experiment) and stages == parallel.pipeline_model_parallel_size:
        own = {VIRTUAL: parallel.virtual_pipeline_model_parallel_size, **equal, **own_numbers(experiment)}
        found += [] if own in found else [own]
    yield from found or [{VIRTUAL: 1, **equal}]


def _unequal_choice(layers: int, stages: int, virtual: int, head: float) -> Choice | None:
    """Returns the numbers with which the slowest stage is fastest; None if equal stages are as fast.

    ``head``: the time of the output layer, in layers. Of equally fast numbers those with the smallest first stage,
    which keeps the activations of most micro-batches.
    """
    best = (layers / stages + head if layers % (stages * virtual) == 0 else math.inf, 0, 0, 0)
    most = math.ceil((layers + head) / stages / virtual) + 1
    for middle in range(virtual * math.ceil(layers / stages / virtual), virtual * most + 1, virtual):
        ends = layers - middle * (stages - 2)
        lowest, highest = max(virtual, ends - middle), min(middle, ends - virtual)
        if lowest > highest:
            continue
        last = min(max(virtual * math.floor((middle - head) / virtual), lowest), highest)
        slowest = max(ends - last, last + head, middle if stages > 2 else 0)
        best = min(best, (slowest, ends - last, last, middle), key=lambda one: (one[0], one[1]))
    _, first, last, middle = best
    if not first:
        return None
    if stages == 2:
        return {FIRST: first, LAST: None}
    return {FIRST: None if first == middle else first, LAST: None if last == middle else last}


def _without_pipeline(own: dict[str, int], layers: int) -> Iterator[Problem]:
    for where, number in own.items():
        if number != layers:
            what = f"there is no pipeline: one stage has all {layers} layers"
            todo = "leave it out, or set pipeline_model_parallel_size to 2 or more"
            yield Problem(where, what, str(number), todo, ("null",))


def _unequal(own: dict[str, int], layers: int, stages: int) -> Iterator[Problem]:
    others, (where, number) = stages - len(own), list(own.items())[-1]
    available = layers - sum(own.values()) + number
    if others == 0:
        fitting = [available] if available > 0 else []
        what = f"the two stages must have num_layers {layers} together"
    else:
        fitting = [one for one in range(1, available) if (available - one) % others == 0]
        rest = "the other stage some" if others == 1 else f"the other {others} stages equally many"
        what = f"must leave {rest} of {available} layers"
    if number not in fitting:
        near = around(fitting, number)
        yield Problem(where, what, str(number), f"use {either(near)}" if near else f"set {FIRST} to less", near)
