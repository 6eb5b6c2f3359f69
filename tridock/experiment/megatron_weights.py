"""Names and shapes of the weights of Megatron-LM's legacy models, and how a checkpoint differs from a model. No I/O."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tridock.contracts.pretrained import listed, shape_text
from tridock.errors import Problem
from tridock.experiment.model import Model
from tridock.experiment.transformers_weights import VOCABULARY, engine_shapes

_LAYER: Final = re.compile(r"^layers\.(\d+)\.(.+)\.(weight|bias)$")
_IN_LAYER: Final = {
    "input_norm": "input_layernorm",
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "dense_h_to_4h": "mlp.dense_h_to_4h",
    "gate": "mlp.dense_h_to_4h",
    "dense_4h_to_h": "mlp.dense_4h_to_h",
}
_OUTSIDE: Final = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "final_norm": "transformer.final_layernorm",
    "output_layer": "output_layer",
}
_GATE: Final = ".gate."
_WIDE: Final = ".dense_h_to_4h."
_BY_COLUMNS: Final = (*VOCABULARY, ".query_key_value.weight", ".query_key_value.bias", _GATE, _WIDE)
_BY_ROWS: Final = ("attention.dense.weight", "dense_4h_to_h.weight")


def megatron_name(name: str) -> str:
    """Returns v1.1.5's name of a weight with this name in engine torch."""
    if layer := _LAYER.match(name):
        return f"language_model.transformer.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
    module, _, kind = name.partition(".")
    return f"language_model.{_OUTSIDE[module]}.{kind}"


def split_dimension(name: str) -> int | None:
    """Returns the dimension in which tensor parallel ranks split a weight of this name; None: each has all of it."""
    return 0 if any(kind in name for kind in _BY_COLUMNS) else 1 if name.endswith(_BY_ROWS) else None


def half(model: Model, name: str) -> int | None:
    """Returns which half of Megatron's matrix a weight of engine torch's name is: with SwiGLU each rank's first matrix
    of the MLP has the gate's rows before the others. None: it is all of it."""
    if not model.swiglu or not (_GATE in name or _WIDE in name):
        return None
    return 0 if _GATE in name else 1


def megatron_differences(
    model: Model, rows: int, parts: Sequence[Mapping[str, Sequence[int]]], folder: str
) -> Iterator[Problem]:
    """Yields weights of the checkpoint in ``folder`` that are missing, of another shape than in the experiment's model,
    or not of it.

    ``rows``: of the token table over all tensor parallel ranks. ``parts``: each rank's shapes, by v1.1.5's names.
    """
    todo = "change the model's fields, or name a checkpoint of its pretrain_gpt2.py"
    expected: dict[str, tuple[int, ...]] = {}
    for name, (first, *rest) in engine_shapes(model, rows):
        whole = (first, *rest) if half(model, name) is None else (2 * first, *rest)
        expected[megatron_name(name)] = _share(name, whole, len(parts))
    for number, shapes in enumerate(parts):
        where = f"{folder}, tensor parallel rank {number},"
        if missing := [name for name in expected if name not in shapes]:
            yield Problem("train.load", f"{where} lacks weights of the experiment's model", listed(missing), todo)
        if odd := sorted(shapes.keys() - expected):
            what = f"{where} holds weights that the experiment's model lacks"
            yield Problem("train.load", what, listed(odd), todo)
        for name, here in expected.items():
            if name in shapes and tuple(shapes[name]) != here:
                what = f"{name} in {where} has another shape than in the experiment's model"
                got = f"{shape_text(shapes[name])}, not {shape_text(here)}"
                yield Problem("train.load", what, got, todo)


def _share(name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Returns the shape of one rank's part of a weight."""
    split = split_dimension(name)
    return tuple(size // ranks if dimension == split else size for dimension, size in enumerate(shape))
