"""Files and options as nobody should write them, by a seed: for the tests of everything that users write."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

CASES = int(os.environ.get("TRIDOCK_FUZZ", "10"))
"""Of each kind; ``TRIDOCK_FUZZ=1000`` looks further."""

SCALARS = (
    "", "0", "1", "-1", "3", "010", "0o17", "0x1F", "12:48", "1_000", "1e3", "1e400", "-1e-400", "2.0", ".5", "1.",
    "+7", ".inf", "-.inf", ".nan", "true", "True", "no", "null", "~", "<<", "=", "9" * 19, "9" * 400, "-" + "9" * 400,
    "9" * 5000, "4294967296", "1000000007", "65536", "2147483647", "2147483648", "x" * 5000, "é" * 90,
    '"a\\0b"', '"\\x1b[2J\\x07"', '"\\u202e"', '"\\ud800"', "\x1b[31m", "\x00", "\u2028", "\u00a0", "*a", "&a 1", "&a",
    "!!python/object:os.system x", "!!int 3", "!!int x", "!!str 3", "!!binary aGk=", "!x 1", "2026-01-02", "7d",
    "9" * 30 + "d", "a b", "a: b", "- a", "[]", "{}", "[1, [2, [3]]]", "{a: 1, a: 2}", "{[1]: 2}",
    "{{a: 1}: 2}", "{1: 2, true: 3}", "[" * 200, "[" * 5000, "{a: " * 300, "'open", '"open', "|", ">-", "#", "@",
    "`x`", "%TAG", "---", "...", "? a", "\t",
    "../" * 1000, "/dev/zero", "/", ".", "$(touch X)", "`id`", "--version", "-", "a/" + "b" * 300, "\ufeff1", "\ud83d",
    "24gib", "0gib", "9" * 30 + "gib", "h100", "bf16", "torch", "zero", "hf:", "hf:/", "node-0@node-1:0,1", "a:0-3",
)  # fmt: skip
"""YAML values, each as its text."""


_LIKELY = (
    *map(str, (0, 1, 2, 3, 4, 7, 8, 12, 48, 64, 127, 256, 1000, 1024, 16384, 65521, 65536, 99991, 1048573, 1048576)),
    *map(str, (134217728, 268435399, 268435456, 2147483647, 0.0, 0.1, 0.5, 0.999999, 1.0, 1e-300, 1e300, 1e-8)),
    "true", "false", "null", "ddp", "fsdp", "zero", "torch", "fp32", "megatron-core", "megatron-deepspeed", "full",
    "selective", "rope", "RMSNorm", "interleaved", "uniform", "block", "gpt2-xl", "llama-3.1-8b", "resnet50", "1d",
    "{zero_optimization: {stage: 3}, train_batch_size: 64, fp16: {enabled: true}}", "[--num-layers, '8']", "{}", "[]",
)  # fmt: skip
"""Values that some field takes, at its bounds or not."""


def _scalar(rng: random.Random) -> str:
    return rng.choice(_LIKELY if rng.random() < 0.6 else SCALARS)


def option_value(rng: random.Random) -> str:
    """A value of an option: without NUL, which no argument can have."""
    return _scalar(rng).replace("\x00", "").encode(errors="replace").decode()


def mutated(rng: random.Random, text: str) -> str:
    """The YAML of a mapping, changed in one to four places, as values or as text."""
    fields = yaml.safe_load(text)
    marks = {}
    for number in range(rng.randint(1, 3)):
        if places := list(_places(fields)):
            holder, key = rng.choice(places)
            mark = f"@@{number}@@"
            marks[mark] = _scalar(rng)
            if rng.random() < 0.9:
                holder[key] = mark
            elif isinstance(holder, dict):
                holder[mark] = holder.pop(key)
    changed = json.dumps(fields) if rng.random() < 0.5 else yaml.safe_dump(fields, sort_keys=False)
    for mark, value in marks.items():
        changed = changed.replace(f'"{mark}"', value).replace(f"'{mark}'", value)
    return changed if rng.random() < 0.8 else _torn(rng, changed)


_OF_JSON = (
    "null", "NaN", "Infinity", "-1e999", "true", "0", "-1", "1.5", "1e300", "9" * 17, "9" * 400, "-" + "9" * 5000,
    "[" * 900 + "]" * 900, "[" * 100_000, '{"a": ' * 30 + "1" + "}" * 30, "[null, {}, []]", '"\\u001b[2J"', "{}",
    '"\\ud800"', '"\\u202e\\u0000"', '"' + "x" * 5000 + '"', '{"": {"\\u001b": 1}}', "[[[]]]", '"../../x"', '""', "[]",
)  # fmt: skip


def in_json(rng: random.Random, text: str) -> str:
    """The text of a JSON document with a value that nobody expects, or torn."""
    try:
        document = [json.loads(text)]
    except (ValueError, RecursionError):
        return text
    holder, key = rng.choice(list(_places(document)))
    holder[key] = "@@"
    changed = json.dumps(document)[1:-1].replace('"@@"', rng.choice(_OF_JSON))
    return changed if rng.random() < 0.9 else _torn(rng, changed)


def _torn(rng: random.Random, text: str) -> str:
    """Text with a piece cut out, doubled, or of something else."""
    begin = rng.randrange(len(text) + 1)
    end = min(len(text), begin + rng.choice((1, 1, 5, 40)))
    piece = rng.choice(("", text[begin:end] * 2, rng.choice(SCALARS), chr(rng.randrange(1, 0x3000)), "\n", "\r", "  "))
    return text[:begin] + piece + text[end:]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def legal(rng: random.Random, fields: Mapping[str, Any], schema: Mapping[str, Any], changes: int) -> dict[str, Any]:
    """The mapping with ``changes`` fields of sections set to values that each is legal alone, up to its bounds."""
    changed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    places = [
        (section, name, kind)
        for section, of in schema["properties"].items()
        for name, kind in _of(schema, of).get("properties", {}).items()
    ]
    for section, name, kind in rng.sample(places, changes):
        changed.setdefault(section, {})[name] = _legal(rng, _of(schema, kind))
    return changed


def _of(schema: Mapping[str, Any], kind: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def _legal(rng: random.Random, kind: Mapping[str, Any]) -> Any:
    kind = rng.choice(kind["anyOf"]) if "anyOf" in kind else kind
    if "enum" in kind:
        return rng.choice(kind["enum"])
    match kind.get("type"):
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            least = kind.get("minimum", kind.get("exclusiveMinimum", 0) + 1)
            most = kind["maximum"]
            near = rng.choice((least, most, most - 1, rng.randint(least, most), 2 ** rng.randrange(most.bit_length())))
            return min(max(near, least), most)
        case "number":
            return min(rng.choice((1e-300, 1e-8, 0.1, 0.5, 1.0, 1e300)), kind.get("exclusiveMaximum", 1e300) * 0.999)
        case "string":
            return rng.choice(("data/x", "949,50,1", "hf:x", "0,0,0"))
    return None
