"""Names and shapes of the weights of transformers' models, and how stored weights differ from them. No I/O."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Self

from tridock.contracts.pretrained import EXTRA_STATE, StoredWeights, listed, shape_text
from tridock.errors import Problem, RequestError
from tridock.experiment.families import GPT2, Family, family_of
from tridock.experiment.model import Model

TOKEN_TABLE: Final = "token_embedding.weight"  # noqa: S105 - no password
VOCABULARY: Final = (TOKEN_TABLE, "output_layer.weight")
_TABLES: Final = (*VOCABULARY, "position_embedding.weight")
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


def half_of(family: Family, name: str) -> int | None:
    """Returns which half of transformers' weight the one of this name in engine torch is, if SwiGLU's two are one."""
    both, kind = ("gate", "dense_h_to_4h"), name.split(".")[-2]
    return both.index(kind) if kind in both and len({family.names.get(one, one) for one in both}) == 1 else None


def is_transposed(family: Family, name: str, dimensions: int) -> bool:
    """Whether transformers has the weight of this name in engine torch as [inputs, outputs]."""
    return family.transposes and dimensions == 2 and name not in _TABLES


def transformers_shapes(model: Model, tokens: int, family: Family | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight by its name in transformers' model, in the order of the forward pass.

    Raises :class:`RequestError` if no family has such a model.
    """
    family = family or family_of(model)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in engine_shapes(model, tokens):
        targets = target_names(family, name)
        parts = [shape]
        if len(targets) == 3:
            parts = [(rows, *shape[1:]) for rows in (model.attention_size, model.key_size, model.key_size)]
        if is_transposed(family, name, len(shape)):
            parts = [(columns, rows) for rows, columns in parts]
        if half_of(family, name) is not None:
            parts = [(2 * shape[0], *shape[1:])]
        found |= dict(zip(targets, parts, strict=True))
    return found


def engine_shapes(model: Model, tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
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


def _layer_shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = model.hidden_size
    yield from _norm("input_norm", model, width)
    inputs = model.attention_size + 2 * model.key_size
    yield from _linear("attention.query_key_value", width, inputs, has_bias=model.has_qkv_bias)
    for name, size in zip(("attention.query_norm", "attention.key_norm"), model.query_and_key_norms, strict=False):
        yield from _norm(name, model, size)
    yield from _linear("attention.dense", model.attention_size, width, has_bias=model.has_attention_bias)
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


def _mlp(prefix: str, model: Model, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("dense_h_to_4h", *(("gate",) if model.swiglu else ())):
        yield from _linear(f"{prefix}{name}", model.hidden_size, ffn, has_bias=model.add_bias_linear)
    yield from _linear(f"{prefix}dense_4h_to_h", ffn, model.hidden_size, has_bias=model.add_bias_linear)


def _linear(name: str, inputs: int, outputs: int, *, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, model: Model, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
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


def weights_differences(model: Model, tokens: int | None, stored: StoredWeights, todo: str) -> Iterator[Problem]:
    """Yields stored weights that are missing, of another shape than in the experiment's model, in a format that is not
    read, or not of the model; and one matrix for two.

    ``tokens`` is the size of its vocabulary, if known. Raises :class:`RequestError` for several models in one.
    """
    where, shapes, aliases, family = stored.folder, stored.shapes, stored.aliases, family_of(model, stored.shapes)
    naming = StoredNames.of(shapes, family, where)
    table = shapes.get(naming.stored(target_names(family, TOKEN_TABLE)[0]))
    expected = transformers_shapes(model, tokens or (table[0] if table else 1), family)
    names = {target: naming.stored(target) for target in expected}
    if missing := [target for target, name in names.items() if name not in shapes]:
        yield Problem("train.load", f"{where} lacks weights of the experiment's model", listed(missing), todo)
    for target, name in names.items():
        if name in shapes and tuple(shapes[name]) != expected[target]:
            what = f"{name} in {where} has another shape than in the experiment's model"
            got = f"{shape_text(shapes[name])}, not {shape_text(expected[target])}"
            yield Problem("train.load", what, got, todo)
    others = stored.other_dtypes
    if formats := [f"{name} in {others[name]}" for name in names.values() if name in others]:
        what, wanted = f"{where} has weights in a format that is not read", "save it in fp32, bf16 or fp16"
        yield Problem("train.load", what, listed(formats), wanted)
    used = [aliases.get(name, name) for name in names.values()]
    if stored.config is None and len({*used}) < len(used):
        what = f"the checkpoint has one matrix for both, in {where}"
        yield Problem("model.untie_embeddings_and_output_weights", what, "true", "set it to false", ("false",))
    buffers = {naming.stored(name): shape for name, shape in _buffers(model, family)}
    known = {*used, *(name for name, shape in buffers.items() if shapes.get(name) == shape)}
    odd = {aliases.get(name, name) for name in shapes if not name.endswith(EXTRA_STATE)} - known
    if odd:
        yield Problem(
            "train.load", f"{where} holds weights that the experiment's model lacks", listed(sorted(odd)), todo
        )


def _buffers(model: Model, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields tensors that older versions of transformers save; since 4.32 they follow from ``config.json`` alone."""
    of_layer: dict[str, tuple[int, ...]] = {"self_attn.rotary_emb.inv_freq": (model.rotary_size // 2,)}
    if family is GPT2:  # the causal mask, and what is added where it is zero
        of_layer = {"attn.bias": (1, 1, model.positions, model.positions), "attn.masked_bias": ()}
    for number in range(model.num_layers):
        yield from ((f"{family.names['layers']}.{number}.{name}", shape) for name, shape in of_layer.items())
