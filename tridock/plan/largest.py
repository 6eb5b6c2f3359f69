"""The largest models that a cluster trains, each with the best layout that the search finds for it."""

from collections.abc import Callable, Iterator, Mapping

from tridock.experiment import Experiment
from tridock.experiment.parameters import model_parameters
from tridock.layout.plan import Slots
from tridock.layout.shape import GPT2_TOKENS
from tridock.plan.assumptions import Assumptions
from tridock.plan.search import count_reasons, overrides_of, search
from tridock.plan.why import JudgedLayout, judge_layout

_ENOUGH = 3
"""The search ends when so many models fit with room to spare: smaller ones fit too."""


def largest(
    presets: Mapping[str, Experiment], slots: Slots, source: str, by: Assumptions, tried: Callable[[int, int], None]
) -> Iterator[tuple[str, int, JudgedLayout | str]]:
    """Yields presets, the largest first, with their parameters and the best layout, or the reason why none works.

    Raises :class:`RequestError` as :func:`search` does.
    """
    sizes = {name: model_parameters(it.model, it.model.vocab_size or GPT2_TOKENS) for name, it in presets.items()}
    fitting = 0
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        found = search(presets[name], slots, source, by, tried)
        if not found.found:
            legal = [one.reason for one in found.rejected if one.is_legal]
            yield name, size, (legal or [count_reasons(found.rejected)[0][0]])[0]
            continue
        changes = (f"model.preset={name}", *overrides_of(found.found[0], presets[name]))
        best = judge_layout(found.found[0].experiment, slots, by, changes)
        yield name, size, best
        fitting += best.verdict == "fits"
        if fitting == _ENOUGH:
            return
