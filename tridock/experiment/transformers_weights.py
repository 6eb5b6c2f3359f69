"""Names and shapes of the weights of transformers' models, and how stored weights differ from them. No I/O."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from tridock.contracts.pretrained import CONFIG, listed, shape_text
from tridock.errors import Problem, RequestError
from tridock.experiment.families import Family, family_of, model_fields
from tridock.experiment.model import Model

Shape = tuple[int, ...]
TOKEN_TABLE: Final = "token_embedding.weight"  # noqa: S105 - no password
VOCABULARY: Final = (TOKEN_TABLE, "output_layer.weight")
_LAYER: Final = re.compile(r"^layers\.(\d+)\.(.+)$")
_EXPERT: Final = re.compile(r"^experts\.(\d+)\.(.+)$")


def target_names(family: Family, name: str) -> list[str]:
    """Returns transformers' name of a weight with this name in engine torch, or the names of its three parts."""
    layer = _LAYER.match(name)
    module, _, kind = (layer[2] if layer else name).rpartition(".")
    if expert := _EXPERT.match(module):
        module, prefix = f"experts.{expert[2]}", f"{family.names['experts']}.{expert[1]}."
        return [f"{family.names['layers']}.{layer[1] if layer else ''}.{prefix}{family.names[module]}.{kind}"]
    modules = family.query_key_value if module == "attention.query_key_value" else (family.names[module],)
    prefix = f"{family.names['layers']}.{layer[1]}." if layer else ""
    return [f"{prefix}{one}.{kind}" for one in modules]


def transformers_shapes(model: Model, tokens: int) -> dict[str, Shape]:
    """Returns the shape of each weight by its name in transformers' model, in the order of the forward pass.

    Raises :class:`RequestError` if no family has such a model.
    """
    family = family_of(model)
    found: dict[str, Shape] = {}
    for name, shape in engine_shapes(model, tokens):
        targets = target_names(family, name)
        parts = [shape]
        if len(targets) == 3:
            parts = [(rows, *shape[1:]) for rows in (model.attention_size, model.key_size, model.key_size)]
        if family.transposes and len(shape) == 2 and "embedding" not in name:
            parts = [(columns, rows) for rows, columns in parts]
        found |= dict(zip(targets, parts, strict=True))
    return found


def engine_shapes(model: Model, tokens: int) -> Iterator[tuple[str, Shape]]:
    """Yields engine torch's names and shapes."""
    width = model.hidden_size
    yield TOKEN_TABLE, (tokens, width)
    if model.position_embedding_type == "learned_absolute":
        yield "position_embedding.weight", (model.positions, width)
    for number in range(model.num_layers):
        yield from ((f"layers.{number}.{name}", shape) for name, shape in _layer_shapes(model))
    yield from _norm("final_norm", model, width)
    if model.untie_embeddings_and_output_weights:
        yield "output_layer.weight", (tokens, width)


def _layer_shapes(model: Model) -> Iterator[tuple[str, Shape]]:
    width = model.hidden_size
    yield from _norm("input_norm", model, width)
    inputs = model.attention_size + 2 * model.key_size
    yield from _linear("attention.query_key_value", width, inputs, has_bias=model.has_qkv_bias)
    if model.qk_layernorm:
        yield from _norm("attention.query_norm", model, model.head_size)
        yield from _norm("attention.key_norm", model, model.head_size)
    yield from _linear("attention.dense", model.attention_size, width, has_bias=model.add_bias_linear)
    yield from _norm("mlp_norm", model, width)
    if model.num_moe_experts is None:
        yield from _mlp("", model, model.ffn_size)
        return
    yield from _linear("router", width, model.num_moe_experts, has_bias=model.add_bias_linear)
    for expert in range(model.num_moe_experts):
        yield from _mlp(f"experts.{expert}.", model, model.expert_size)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _mlp("shared_expert.", model, model.moe_shared_expert_intermediate_size)
        if model.moe_shared_expert_gate:
            yield from _linear("shared_expert_gate", width, 1, has_bias=False)


def _mlp(prefix: str, model: Model, ffn: int) -> Iterator[tuple[str, Shape]]:
    for name in ("dense_h_to_4h", *(("gate",) if model.swiglu else ())):
        yield from _linear(f"{prefix}{name}", model.hidden_size, ffn, has_bias=model.add_bias_linear)
    yield from _linear(f"{prefix}dense_4h_to_h", ffn, model.hidden_size, has_bias=model.add_bias_linear)


def _linear(name: str, inputs: int, outputs: int, *, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, model: Model, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if model.normalization == "LayerNorm":
        yield f"{name}.bias", (size,)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How stored names differ from those of transformers' model: a part precedes all, if the model was inside another
    one, and a base model's names lack their first part."""

    prefix: str
    base: str

    @classmethod
    def of(cls, names: Collection[str], family: Family, where: str) -> Self:
        """Raises :class:`RequestError` if there are several models."""
        (first,) = target_names(family, TOKEN_TABLE)
        base = f"{first.partition('.')[0]}."
        for known, lacking in ((first, ""), (first.removeprefix(base), base)):
            found = [name for name in names if name == known or name.endswith(f".{known}")]
            if len(found) > 1:
                todo = "save one of the models alone"
                raise RequestError(
                    Problem("train.load", f"{where} holds several models", ", ".join(sorted(found)), todo)
                )
            if found:
                return cls(found[0].removesuffix(known), lacking)
        return cls("", "")

    def stored(self, target: str) -> str:
        """Returns the stored name of a weight of transformers' model, if it is there."""
        return self.prefix + target.removeprefix(self.base)


def config_problems(
    experiment_model: Model, config: Mapping[str, Any], folder: str, tokens: int | None
) -> Iterator[Problem]:
    """Yields every difference of an experiment's model from the ``config.json`` in ``folder``.

    Raises :class:`RequestError` if its architecture, or an option of it, is not supported.
    """
    where = f"{folder}/{CONFIG}"
    model = experiment_model.model_copy(update={"vocab_size": tokens})
    try:
        fields = model_fields(config, where)
        theirs = Model.model_validate({"seq_length": model.seq_length, **fields})
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        got = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        todo = "download it again: transformers' save_pretrained writes it"
        raise RequestError(Problem(where, "describes no model", got, todo)) from None
    if model.rotary_size and model.positions <= theirs.positions:
        del fields["max_position_embeddings"]  # without a position table, shorter samples use the same model
    if tokens is None:
        del fields["vocab_size"]
    for name in fields:
        there, here = _meaning(theirs, name), _meaning(model, name)
        if there != here:
            want = yaml_value(there)
            yield Problem(
                f"model.{name}", f"the model in {folder} has {there}", str(here), f"set it to {want}", (want,)
            )


_SIZES: Final = {
    "kv_channels": "head_size",
    "num_query_groups": "query_groups",
    "ffn_hidden_size": "ffn_size",
    "moe_ffn_hidden_size": "expert_size",
    "max_position_embeddings": "positions",
    "activation_func": "gelu",
}


def yaml_value(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _meaning(model: Model, name: str) -> Any:
    """Returns the value of a field, or its default size if it is omitted."""
    return getattr(model, _SIZES.get(name, name))


def weights_differences(
    model: Model,
    tokens: int | None,
    shapes: Mapping[str, Sequence[int]],
    aliases: Mapping[str, str],
    where: str,
    todo: str,
    *,
    exactly: bool,
) -> Iterator[Problem]:
    """Yields stored weights that are missing or of another shape than in the experiment's model; with ``exactly``,
    also those that are not of the model, and one matrix for two.

    ``tokens`` is the size of its vocabulary, if known. Raises :class:`RequestError` for several models in one.
    """
    naming = StoredNames.of(shapes, family_of(model), where)
    table = shapes.get(naming.stored(target_names(family_of(model), TOKEN_TABLE)[0]))
    expected = transformers_shapes(model, tokens or (table[0] if table else 1))
    names = {target: naming.stored(target) for target in expected}
    if missing := [target for target, name in names.items() if name not in shapes]:
        yield Problem("train.load", f"{where} lacks weights of the experiment's model", listed(missing), todo)
        return
    for target, name in names.items():
        if tuple(shapes[name]) != expected[target]:
            what = f"{name} in {where} has another shape than in the experiment's model"
            got = f"{shape_text(shapes[name])}, not {shape_text(expected[target])}"
            yield Problem("train.load", what, got, todo)
    if not exactly:
        return
    used = [aliases.get(name, name) for name in names.values()]
    if len({*used}) < len(used):
        what = f"the checkpoint has one matrix for both, in {where}"
        yield Problem("model.untie_embeddings_and_output_weights", what, "true", "set it to false", ("false",))
    if odd := sorted({aliases.get(name, name) for name in shapes} - {*used}):
        yield Problem("train.load", f"{where} holds weights that the experiment's model lacks", listed(odd), todo)
