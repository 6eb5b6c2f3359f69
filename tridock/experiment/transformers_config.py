"""``config.json`` of transformers' models, read and written. No I/O."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tridock.errors import Problem, RequestError, cut
from tridock.experiment.families import (
    FAMILIES,
    GPT2,
    GRANITE,
    OWN_HEADS,
    PHI3,
    SUPPORTED,
    Family,
    family_of,
)
from tridock.experiment.model import Model
from tridock.experiment.transformers_keys import (
    ABSENT,
    COMMON,
    FLOAT,
    NUMBER,
    OWN,
    ROPE_TYPES,
    WHOLE,
    Honoured,
    Key,
    OfExperiment,
    Only,
    keys_of,
    rotation_keys,
)
from tridock.strict_yaml import validated

Config = Mapping[str, Any]
_TYPES: Final[Mapping[str, Any]] = {WHOLE: int, FLOAT: float, NUMBER: (int, float)}
_ROPE: Final = ("rope_parameters", "rope_scaling")
_AGAIN: Final = "download it again: transformers' save_pretrained writes it"


def model_fields(config: Config, where: str) -> dict[str, Any]:
    """Returns the fields of an experiment's model that correspond to a ``config.json``, the file ``where``.

    Raises :class:`RequestError` for an architecture that is not supported, or with every key that is not known, has a
    value that is not supported, or is missing.
    """
    names = config.get("architectures") or config.get("model_type")
    name = names[0] if isinstance(names, list) else names
    family = next((one for one in FAMILIES if name in (one.architecture, one.model_type)), None)
    if family is None:
        what = "is of an architecture that is not supported"
        todo = f"use one of {SUPPORTED}, or train it with TRL: tridock init --recipe sft"
        raise RequestError(Problem(where, what, str(name), todo))
    known = keys_of(family)
    kind, entries = ("default", []) if family is GPT2 else _rotations(config, family)
    entries += [(key, known.get(key), value) for key, value in config.items() if family is GPT2 or key not in _ROPE]
    problems: list[Problem] = []
    fields: dict[str, Any] = {}
    for name, key, value in entries:
        problem = _problem(key, value)
        if problem is None and isinstance(key, Honoured):
            meant = _meaning(key, value)
            if fields.setdefault(key.field, meant) != meant:
                problem = "contradicts another key", f"keep one of the keys that say {key.field}"
        if name == "layer_types" and isinstance(value, list) and len(value) != config.get("num_hidden_layers"):
            problem = "does not have num_hidden_layers items", _AGAIN
        if name == "no_rope_layers" and isinstance(value, list):
            todo = "use a model where they are the last of each so many layers"
            problem = None if _follow(value, config) else ("are not those of no_rope_layer_interval", todo)
        if problem is not None:
            problems.append(Problem(f"{where}: {name}", problem[0], _text(value), problem[1]))
    given = {name.rpartition(".")[2] for name, *_ in entries}
    lacking = [name for name, key in ROPE_TYPES.get(kind, {}).items() if _is_needed(key) and name not in given]
    for name, key in known.items():
        if isinstance(key, Only) and key.is_required and name not in given:
            lacking.append(name)
        if isinstance(key, Honoured) and name not in given and key.field not in fields:
            if key.default is ABSENT:
                lacking.append(name)
            fields[key.field] = None if key.default is None else _meaning(key, key.default)
    if lacking:
        problems.append(Problem(where, "describes no model", f"no {', no '.join(lacking)}", _AGAIN))
    RequestError.raise_for(problems)
    stretched: dict[str, Any] = {} if family is GPT2 else {"use_rope_scaling": kind != "default"}
    stretched |= {} if kind == "default" else {"rope_scaling_type": kind}
    fields = {"num_moe_experts": None, **family.required, **stretched, **fields}
    keys = [*known.items(), *((name, key) for name, key, _ in entries)]
    names = {"kv_channels": "head_dim", **{it.field: name for name, it in keys if isinstance(it, Honoured)}}
    try:
        theirs = validated(Model, {"seq_length": 1, **fields}, where)
    except RequestError as error:
        own = {f"{where}: {field}": f"{where}: {name}" for field, name in names.items()}
        raise RequestError([replace(it, where=own.get(it.where, it.where)) for it in error.problems]) from None
    RequestError.raise_for(_size_problems(theirs, family, where, names))
    if theirs.attention_multiplier == 1 / math.sqrt(theirs.head_size):
        theirs = theirs.model_copy(update={"attention_multiplier": None})
    return {name: theirs.value_of(name) for name in Model.model_fields if name in fields}


def trained_fields(config: Config, where: str) -> dict[str, Any]:
    """Returns :func:`model_fields`, and how such a model is trained by its ``config.json``: with which dropout, initial
    weights and auxiliary loss, and with samples as long as its context."""
    fields = model_fields(config, where)
    trained: dict[str, Any] = {}
    for key, it in {**COMMON, **OWN[config["model_type"]]}.items():
        if not isinstance(it, OfExperiment) or (value := config.get(key)) is None:
            continue
        if trained.setdefault(it.field, value) != value:
            todo = f"make them equal: the model has one {it.field}"
            raise RequestError(Problem(f"{where}: {key}", "contradicts another key", _text(value), todo))
    dropout = {} if config["model_type"] == GPT2.model_type else {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return {"seq_length": fields["max_position_embeddings"], **dropout, **trained, **fields}


def _size_problems(model: Model, family: Family, where: str, names: Mapping[str, str]) -> Iterator[Problem]:
    """Yields sizes that no model of the family has together, by the keys' ``names``."""
    heads, width = model.num_attention_heads, model.hidden_size
    of_heads, by = f"{names['num_attention_heads']} {heads}", f"{names['hidden_size']} {width}"
    found: list[tuple[str, str, int]] = []
    if model.kv_channels is None and width % heads:
        found.append(("num_attention_heads", f"does not divide {by}", heads))
    elif family in OWN_HEADS and model.attention_size != width:
        found.append(("kv_channels", f"is not {by} / {of_heads}", model.head_size))
    elif model.rotary_size % 2:
        found.append(("kv_channels", f"is odd, of {by} and {of_heads}: its halves are rotated", model.head_size))
    if heads % model.query_groups:
        found.append(("num_query_groups", f"does not divide {of_heads}", model.query_groups))
    if model.active_experts > model.experts:
        found.append(("moe_router_topk", f"is more than {names['num_moe_experts']}", model.moe_router_topk))
    yield from (Problem(f"{where}: {names[field]}", what, str(got), _AGAIN) for field, what, got in found)


def _rotations(config: Config, family: Family) -> tuple[str, list[tuple[str, Key | None, Any]]]:
    """Returns the type of rotary embeddings, and the entries of ``rope_parameters`` and ``rope_scaling``."""
    outer = {name: config[name] for name in _ROPE if name in config}
    inner = [(name, key, value) for name, it in outer.items() if isinstance(it, dict) for key, value in it.items()]
    kind = str(next((value for _, key, value in inner if key in ("rope_type", "type")), "default"))
    types = ("default",) if family is PHI3 else tuple(ROPE_TYPES)
    if kind not in types:
        kind, inner = "", [it for it in inner if it[1] in ("rope_type", "type")]
    keys = rotation_keys(kind, keys_of(family)["rope_theta"], types)
    odd = [(name, Only(({}, None)), it) for name, it in outer.items() if not isinstance(it, dict)]
    return kind, [*odd, *((f"{name}.{key}", keys.get(key), value) for name, key, value in inner)]


def _problem(key: Key | None, value: Any) -> tuple[str, str] | None:
    """Returns what is wrong with a key's value, and what to do."""
    if key is None:
        todo = "use a model without it, or remove it from config.json if no weight and no logit depends on it"
        return "is not a key that is known", todo
    if isinstance(key, Only):
        first, *others = key.values
        of_items = key.of_each and isinstance(value, list) and value
        given, choices = (value, [first]) if of_items else ([value], others if key.of_each else key.values)
        if not all(any(_is_same(one, choice) for choice in choices) for one in given):
            return key.what, f"use a model that has {_text(first)}"
    if isinstance(key, Honoured) and _meaning(key, value) is ABSENT:
        if isinstance(key.kind, str):
            return f"is no {key.kind}", _AGAIN
        return "is not supported", f"use a model that has {' or '.join(map(_text, key.kind))}"
    return None


def _follow(layers: Sequence[Any], config: Config) -> bool:
    """Whether ``no_rope_layers`` is 0 for the last of each ``no_rope_layer_interval`` layers, else 1."""
    interval = config.get("no_rope_layer_interval", 4)
    if not isinstance(interval, int) or interval < 1 or len(layers) != config.get("num_hidden_layers"):
        return False
    return [*layers] == [int(number % interval != 0) for number in range(1, len(layers) + 1)]


def _is_needed(key: Key) -> bool:
    return key.default is ABSENT if isinstance(key, Honoured) else isinstance(key, Only) and key.is_required


def _meaning(key: Honoured, value: Any) -> Any:
    """Returns the field's value that a key's value means; ABSENT if it means none."""
    if isinstance(key.kind, Mapping):
        return next((ours for theirs, ours in key.kind.items() if _is_same(value, theirs)), ABSENT)
    if value is None and key.or_null:
        return None
    is_number = isinstance(value, _TYPES[key.kind]) and not isinstance(value, bool)
    return value if is_number and (isinstance(value, int) or math.isfinite(value)) else ABSENT


def _is_same(value: Any, choice: Any) -> bool:
    return type(value) is type(choice) and value == choice


def _text(value: Any) -> str:
    return cut(json.dumps(value), 80)


def config_of(model: Model, tokens: int, dtype: str, special: Config | None) -> dict[str, Any]:
    """Returns the ``config.json`` of a model with ``tokens`` in its vocabulary, and the ids of ``special`` ones."""
    family = family_of(model)
    model = model.model_copy(update={"vocab_size": tokens})
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    written |= {"torch_dtype": dtype, "pad_token_id": None, **(special or {"bos_token_id": None, "eos_token_id": None})}
    for key, it in {**COMMON, **OWN[family.model_type]}.items():
        if isinstance(it, Honoured | OfExperiment):
            written[key] = value = model.value_of(it.field)
            if isinstance(it, Honoured) and isinstance(it.kind, Mapping):
                written[key] = next(theirs for theirs, ours in it.kind.items() if ours == value)
        elif isinstance(it, Only) and key not in COMMON and not it.of_each:
            written[key] = it.values[0]
    if family is GRANITE:
        written["attention_multiplier"] = model.attention_multiplier or 1 / math.sqrt(model.head_size)
    if model.use_rope_scaling:
        needed = {key: it for key, it in ROPE_TYPES[model.rope_scaling_type].items() if _is_needed(it)}
        stretch = {key: it.values[0] for key, it in needed.items() if isinstance(it, Only)}
        stretch |= {key: model.value_of(it.field) for key, it in needed.items() if isinstance(it, Honoured)}
        written["rope_scaling"] = {"rope_type": model.rope_scaling_type, **stretch}
    return written
