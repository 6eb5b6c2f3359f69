"""Why a layout is better or worse than another: the terms of its time and memory, and those of its neighbors.

A neighbor differs in one choice of the search by one step (the next larger or smaller size, another way to recompute)
and in the fields that this choice implies.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from operator import attrgetter
from typing import Any, Final

from tridock.engines import cost_model_of
from tridock.engines.fields import as_overrides
from tridock.engines.offload import Offload
from tridock.engines.rules import Choice
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout.plan import Slots, layout_label, size_of_world
from tridock.plan.assess import Assessment, assess
from tridock.plan.assumptions import Assumptions
from tridock.plan.memory import GIB
from tridock.plan.search import choices, with_global_batch

_OFFLOADED: Final = "deepspeed.zero_optimization.offload_{}={{device: cpu}}"
_SHORT: Final = {
    "TP": "parallel.tensor_model_parallel_size",
    "PP": "parallel.pipeline_model_parallel_size",
    "VPP": "parallel.virtual_pipeline_model_parallel_size",
    "FIRST": "parallel.decoder_first_pipeline_num_layers",
    "LAST": "parallel.decoder_last_pipeline_num_layers",
    "CP": "parallel.context_parallel_size",
    "EP": "parallel.expert_model_parallel_size",
    "ETP": "parallel.expert_tensor_parallel_size",
    "MB": "batch.micro_batch_size",
    "ZERO-": "parallel.zero_stage",
}
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "SP": ("parallel.sequence_parallel=true",),
    "DIST": ("parallel.use_distributed_optimizer=true",),
    "ONCE": ("parallel.reduce_gradients_once=true",),
    "O": (_OFFLOADED.format("optimizer"),),
    "OP": (_OFFLOADED.format("optimizer"), _OFFLOADED.format("param")),
}
_LABEL: Final = re.compile(r"(TP|PP|VPP|FIRST|LAST|CP|EP|ETP|DP|MB|ZERO-)([0-9]{1,7})", re.IGNORECASE)
_OFF: Final = (
    f"{_SHORT['VPP']}=1",
    f"{_SHORT['FIRST']}=null",
    f"{_SHORT['LAST']}=null",
    f"{_SHORT['CP']}=1",
    f"{_SHORT['EP']}=1",
    f"{_SHORT['ETP']}=null",
    "parallel.sequence_parallel=false",
)
"""The overrides for words that a label omits."""


@dataclass(frozen=True)
class JudgedLayout(Assessment):
    """A layout with every reason against it, or its memory and time."""

    changes: tuple[str, ...] = ()
    """``--set`` overrides that turn the experiment into this layout."""

    @property
    def label(self) -> str:
        """Returns the label that the search prints."""
        parallel = self.experiment.parallel
        sequence = " SP" if parallel.sequence_parallel else ""
        micro = self.experiment.batch.micro_batch_size
        label = layout_label(parallel, self.data_parallel_size)
        return f"{label}{sequence} MB{micro} {states_of(self.experiment)}".rstrip()

    @property
    def time(self) -> dict[str, float]:
        """Returns the seconds of an iteration by term; empty without an estimate."""
        return {} if self.cost is None or self.cost.estimate is None else self.cost.estimate.terms

    @property
    def memory_terms(self) -> dict[str, int]:
        """Returns the bytes of a rank of the worst stage by term; empty if the layout is illegal."""
        return {} if self.worst is None else {term.name: term.bytes for term in self.worst.terms}

    def layout_document(self) -> dict[str, Any]:
        """Returns the layout for ``--json``."""
        worst = self.worst
        return {
            "layout": self.label,
            "set": list(self.changes),
            "verdict": self.verdict,
            "seconds": self.seconds,
            "total_gib": None if worst is None else round(worst.total_bytes / GIB, 4),
            "least_gib": None if worst is None else round(worst.least_bytes / GIB, 4),
            "stage": None if worst is None else worst.stage,
            "time": self.time,
            "memory": {name: round(amount / GIB, 4) for name, amount in self.memory_terms.items()},
            "problems": [problem.document for problem in self.problems],
        }


@dataclass(frozen=True, slots=True)
class Why:
    """A layout and the layouts that it is compared with."""

    layout: JudgedLayout
    others: tuple[JudgedLayout, ...]

    def document(self) -> dict[str, Any]:
        """Returns the comparison for ``--json``: differences are the other's figures minus the layout's."""
        return {
            "layout": self.layout.layout_document(),
            "others": [
                {
                    **other.layout_document(),
                    "time_difference": difference(self.layout.time, other.time),
                    "memory_difference": {
                        name: round(amount / GIB, 4)
                        for name, amount in difference(self.layout.memory_terms, other.memory_terms).items()
                    },
                }
                for other in self.others
            ],
        }


def states_of(experiment: Experiment) -> str:
    """Returns how a layout shards its states, as the search prints it: ``ZeRO-1``, ``dist``, ``once``, or nothing."""
    parallel = experiment.parallel
    words = (
        f"ZeRO-{parallel.zero_stage}{Offload.of(experiment).label}" if parallel.zero_stage else "",
        "dist" if parallel.use_distributed_optimizer else "",
        "once" if parallel.reduce_gradients_once else "",
    )
    return " ".join(filter(None, words))


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns ``after`` minus ``before`` by term, the largest change first; empty if one of the two is unknown."""
    if not before or not after:
        return {}
    names = dict.fromkeys((*before, *after))
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return dict(sorted(((name, value) for name, value in changes.items() if value), key=lambda item: -abs(item[1])))


def judge_layout(
    experiment: Experiment, slots: Slots, assumptions: Assumptions, changes: Sequence[str] = ()
) -> JudgedLayout:
    """Judges one layout; ``changes`` are only recorded. Raises :class:`RequestError` without a cost model."""
    cost_model_of(experiment)
    return JudgedLayout(**vars(assess(experiment, slots, "", assumptions)), changes=tuple(changes))


def neighbors(experiment: Experiment, slots: Slots, assumptions: Assumptions) -> Why:
    """Returns the layout and its neighbors: those that fit, then tight ones, then those that do not fit or are illegal,
    each the fastest first."""
    world_size = size_of_world(slots)
    base = with_global_batch(experiment, world_size)
    others = [
        judge_layout(base.with_fields(choice), slots, assumptions, as_overrides(choice))
        for choice in _steps(base, world_size)
    ]
    order = ("fits", "tight", "no-fit", "illegal")
    others.sort(key=lambda one: (order.index(one.verdict), one.seconds or 0.0))
    return Why(judge_layout(base, slots, assumptions), tuple(others))


def _steps(base: Experiment, world_size: int) -> Iterator[Choice]:
    """Yields the change of each neighbor, without duplicates."""
    tried = [dict(choice) for choice in choices(base, world_size)]
    fields = dict.fromkeys(path for choice in tried for path in choice)
    current = {path: attrgetter(path)(base) for path in fields}
    # A value outside the search, such as recomputation of every second layer, stays if another section is changed.
    own = {path for path in fields if current[path] not in [choice[path] for choice in tried if path in choice]}
    found: list[dict[str, object]] = []
    for path in fields:
        section = path.partition(".")[0]
        kept = {name for name in own if name.partition(".")[0] != section}
        for group in _directions(current[path], path, tried):
            changed = [
                {name: new for name, new in choice.items() if new != current[name] and name not in kept}
                for choice in group
            ]
            nearest = min(changed, key=lambda change: (len(change), _distance(change, current)))
            if nearest not in found:
                found.append(nearest)
    yield from found


def _directions(value: object, path: str, tried: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yields the search's changes to a smaller and a larger size, or from none to a size; else to each other value."""
    others = [choice for choice in tried if path in choice and choice[path] != value]
    are_sizes = all(_is_size(choice[path]) for choice in others)
    if are_sizes and _is_size(value):
        groups = [[choice for choice in others if (choice[path] < value) == smaller] for smaller in (True, False)]
    elif are_sizes and value is None:
        groups = [others]
    else:
        values = dict.fromkeys(choice[path] for choice in others)
        groups = [[choice for choice in others if choice[path] == other] for other in values]
    yield from (group for group in groups if group)


def _distance(change: Mapping[str, Any], current: Mapping[str, Any]) -> float:
    """Returns the distance in doublings and halvings, summed over all sizes."""
    sizes = ((new, current[name]) for name, new in change.items() if _is_size(new) and _is_size(current[name]))
    return sum(abs(log2(max(new, 0.5) / max(old, 0.5))) for new, old in sizes)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- layouts that a user names ---------------------------------------------------------------------------------------


def overrides_of_layout(text: str) -> list[str]:
    """Returns the ``--set`` overrides of a layout as the search prints it (``TP4 PP2 DP2 SP MB2 ZeRO-1``), or of its
    fields (``parallel.zero_stage=1``), separated by spaces or commas outside brackets.

    With TP or PP given, omitted VPP, FIRST, LAST, CP, EP, ETP and SP are off. Raises :class:`RequestError` with every
    word it does not know.
    """
    found: dict[str, str] = {}
    wrong = []
    words = _words(text)
    if any(word.upper().startswith(("TP", "PP")) for word in words):
        found = {override.partition("=")[0]: override for override in _OFF}
    for word in words:
        field, equals, _ = word.partition("=")
        if label := _LABEL.fullmatch(word):
            if (name := label[1].upper()) != "DP":
                found[_SHORT[name]] = f"{_SHORT[name]}={int(label[2])}"
        elif word.upper() in _WORDS:
            found |= {override.partition("=")[0]: override for override in _WORDS[word.upper()]}
        elif equals and field:
            found[field] = word
        else:
            wrong.append(word)
    if wrong or not words:
        todo = "give it as the search prints it, as in 'TP4 PP2 MB2 SP', or by fields, as in batch.micro_batch_size=2"
        raise RequestError([Problem("--why", "is not a layout", repr(word), todo) for word in wrong or [text]])
    return list(found.values())


def _words(text: str) -> list[str]:
    """Splits a layout at spaces and commas that are not within brackets."""
    words, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if depth <= 0 and (character == "," or character.isspace()):
            words.append("")
        else:
            words[-1] += character
    return [word for word in words if word]


def check_data_parallel(text: str, judged: JudgedLayout) -> None:
    """Raises :class:`RequestError` if a layout names another data parallel size than it has on these slots."""
    named = [int(label[2]) for word in _words(text) if (label := _LABEL.fullmatch(word)) and
             label[1].upper() == "DP"]  # fmt: skip
    data = judged.data_parallel_size
    if not judged.problems and any(size != data for size in named):
        what = f"follows from the slots: it is DP{data} with the other sizes"
        raise RequestError(Problem("--why", what, text, "leave DP out"))


def with_batch_of(base: Experiment, slots: Slots, other: Experiment) -> Experiment:
    """Returns ``other`` with ``base``'s global batch on these slots if it gives none: the same work."""
    if other.batch.global_batch_size is not None:
        return other
    fixed = with_global_batch(base, size_of_world(slots)).batch.global_batch_size
    return other.with_fields({"batch.global_batch_size": fixed})
