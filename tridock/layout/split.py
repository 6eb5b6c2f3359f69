"""How a model may be split over ranks by any engine, and the legal values nearest to an illegal one."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product

from tridock.errors import Problem
from tridock.experiment import Experiment


def head_problems(experiment: Experiment, *, repeats_groups: bool = False) -> Iterator[Problem]:
    """Yields attention heads, query groups and MLP columns that the tensor parallel ranks cannot split evenly.

    ``repeats_groups``: a query group may lie on several ranks.
    """
    model, tensor = experiment.model, experiment.parallel.tensor_model_parallel_size
    inputs = model.attention_size + 2 * model.key_size
    shared = {"num_attention_heads": model.num_attention_heads}
    # Otherwise the MLP width is a multiple of the heads.
    if (model.kv_channels or model.ffn_hidden_size or model.swiglu) and not model.num_moe_experts:
        shared["ffn_hidden_size"] = model.ffn_size
    repeated = repeats_groups and tensor % model.query_groups == 0 and inputs % tensor == 0
    if model.query_groups < model.num_attention_heads and not repeated:
        shared["num_query_groups"] = model.query_groups
    if uneven := [name for name, size in shared.items() if size % tensor]:
        whole, named = math.gcd(*shared.values()), f"{uneven[0]} {shared[uneven[0]]}"
        yield must_divide("parallel.tensor_model_parallel_size", tensor, whole, named)


def empty_stage_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields more stages than layers: the pipelines of DeepSpeed and engine torch fail if a stage has no layer."""
    layers, stages = experiment.model.num_layers, experiment.parallel.pipeline_model_parallel_size
    if layers < stages:
        what, todo = f"must be at most num_layers {layers}", f"use {layers} or fewer"
        yield Problem("parallel.pipeline_model_parallel_size", what, str(stages), todo, (layers,))


def world_problems(experiment: Experiment, world_size: int, takes: Callable[[Experiment], bool]) -> Iterator[Problem]:
    """Yields a world size that replicas do not fill. ``takes``: whether the engine supports the parallel sizes."""
    size = size_of_replica(experiment)
    if world_size % size == 0:
        return
    context = experiment.parallel.context_parallel_size > 1
    worlds = around((world_size // size * size, (world_size // size + 1) * size), world_size)
    layouts = nearest_layouts(experiment, world_size, takes)
    slots = f"{either(number for number in worlds if number)} slots"
    yield Problem(
        "parallel",
        f"tensor x pipeline{' x context' if context else ''} size {size} must divide the {world_size} slots"
        " of the hostfile",
        f"{world_size} slots",
        f"use {either(layouts)}, or {slots}" if layouts else f"use {slots}",
        layouts,
    )


def nearest_layouts(experiment: Experiment, world_size: int, takes: Callable[[Experiment], bool]) -> tuple[str, ...]:
    """Returns up to two layouts of the model, as ``TP4 PP8``, that fill the slots, the most similar first."""
    parallel = experiment.parallel
    wanted = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    sizes = divisors(world_size)
    fitting = [
        layout
        for layout in product(sizes, sizes, divisors(wanted[2]))
        if world_size % math.prod(layout) == 0 and takes(_with_sizes(experiment, layout))
    ]
    fitting.sort(key=lambda layout: (_distance(layout, wanted), layout))
    return tuple(
        f"TP{tensor} PP{stages}" + (f" CP{context}" if context > 1 else "") for tensor, stages, context in fitting[:2]
    )


def _with_sizes(experiment: Experiment, sizes: tuple[int, ...]) -> Experiment:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return experiment.with_fields(dict(zip((f"parallel.{name}" for name in names), sizes, strict=True)))


def _distance(layout: tuple[int, ...], wanted: tuple[int, ...]) -> float:
    """Returns the distance of two layouts, in doublings and halvings."""
    return sum(abs(math.log2(size / other)) for size, other in zip(layout, wanted, strict=True))


def size_of_replica(experiment: Experiment) -> int:
    """Returns the number of ranks that process the same samples."""
    parallel = experiment.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


@cache
def divisors(number: int) -> tuple[int, ...]:
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    large = [number // candidate for candidate in reversed(small)]
    return tuple(small if small[-1] != large[0] else small[:-1]) + tuple(large)


def around(choices: Iterable[int], wanted: int) -> tuple[int, ...]:
    """Returns the choices next to ``wanted``: the greatest below it and the least above it, if any."""
    ordered = sorted(choices)
    below = [choice for choice in ordered if choice < wanted]
    above = [choice for choice in ordered if choice > wanted]
    return (*below[-1:], *above[:1])


def nearest_divisors(number: int, wanted: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Returns the divisors of ``number`` next to ``wanted``; if possible, only multiples of ``multiple_of``."""
    found = divisors(number)
    return around([d for d in found if d % multiple_of == 0], wanted) or around(found, wanted)


def must_divide(where: str, size: int, whole: int, named: str, more: str = "", multiple_of: int = 1) -> Problem:
    """Returns the problem of a ``size`` that does not divide ``whole``, with the divisors next to it. ``named``: what
    is divided. ``more``: other remedies."""
    near = nearest_divisors(whole, size, multiple_of)
    return Problem(where, f"must divide {named}", str(size), f"use {either(near)}{more}", near)


def nearest_multiples(number: int, wanted: int) -> tuple[int, ...]:
    """Returns the multiples of ``number`` next to ``wanted``: the greatest below it, if any, and the least above it."""
    below = wanted // number * number
    return (below, below + number) if below else (number,)


def nearest_multiple(number: int, wanted: int) -> int:
    """Returns the nearer of the two; the greater on a tie."""
    return min(nearest_multiples(number, wanted), key=lambda multiple: (abs(multiple - wanted), -multiple))


def either(choices: Iterable[int | str]) -> str:
    """``2 or 4``."""
    return " or ".join(str(choice) for choice in choices)
