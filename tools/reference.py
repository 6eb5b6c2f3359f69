"""Writes configs/reference.yaml, configs/slurm/reference.yaml, and what is generated in docs/: cluster.md's fields,
gpus.md's base images, commands.md's options, the keys in config-json.md.

A test compares them with the schemas and the parsers: a field or an option cannot be added without them.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tridock.base_images import BASE_IMAGES, BaseImage
from tridock.cli import build_parser
from tridock.cluster.schema import Settings
from tridock.experiment import transformers_keys as keys
from tridock.experiment.families import FAMILIES
from tridock.experiment.schema import Experiment
from tridock.launchers.slurm.request import Request

WIDTH = 110
UNKNOWN = "not known"
BEGIN, END = "<!-- fields: written by make reference -->", "<!-- end of fields -->"
BASES_BEGIN, BASES_END = "<!-- base images: written by make reference -->", "<!-- end of base images -->"
OPTIONS_BEGIN, OPTIONS_END = "<!-- options: written by make reference -->", "<!-- end of options -->"
KEYS_BEGIN, KEYS_END = "<!-- keys: written by make reference -->", "<!-- end of keys -->"
REQUIRED = {
    "name": "example",
    "model.num_layers": 24,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 16,
    "model.seq_length": 1024,
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 64,
    "data.data_path": "data/demo/stdlib_text_document",
    "train.train_iters": 1000,
}


def experiment_reference() -> str:
    """Every field of an experiment with its default, choices and meaning; itself an experiment that loads."""
    head = "# Every field of an experiment. Required ones are marked; the others show their defaults.\n"
    head += "# Written by `make reference` from tridock/experiment/schema.py.\n"
    return head + "\n".join(_fields(Experiment, "", 0)) + "\n"


def cluster_reference() -> str:
    """The same for the settings beside a hostfile."""
    return "\n".join(_fields(Settings, "", 0)) + "\n"


def slurm_reference() -> str:
    """The same for a site's profile."""
    head = "# Every field of a site's profile (tridock slurm --profile), with its default.\n"
    head += "# Written by `make reference` from tridock/launchers/slurm/request.py.\n"
    return head + "\n".join(_fields(Request, "", 0)) + "\n"


def _fields(model: type[BaseModel], path: str, depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            yield from _comment((inner.__doc__ or "").splitlines()[0], pad)
            yield f"{pad}{name}:"
            yield from _fields(inner, f"{path}{name}.", depth + 1)
            continue
        required = field.is_required()
        sentences = [field.description or "", f"One of {_choices(field)}." if _choices(field) else ""]
        yield from _comment(" ".join(["Required.", *sentences] if required else sentences).strip(), pad)
        value = REQUIRED[path + name] if required or path + name == "data.data_path" else _default(field)
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
        yield f"{pad}{name}: {text}"


def _comment(text: str, pad: str) -> list[str]:
    return [f"{pad}# {line}" for line in textwrap.wrap(text.replace("``", "`"), WIDTH - len(pad))]


def _default(field: FieldInfo) -> object:
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    return list(value) if isinstance(value, tuple) else value


def _choices(field: FieldInfo) -> str:
    if typing.get_origin(field.annotation) is not typing.Literal:
        return ""
    return ", ".join(str(choice) for choice in typing.get_args(field.annotation))


def _section(annotation: object) -> type[BaseModel] | None:
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    return None


def with_fields(page: str) -> str:
    """docs/cluster.md with its list of fields brought up to date."""
    return _replaced(page, BEGIN, f"```yaml\n{cluster_reference()}```", END)


def with_base_images(page: str) -> str:
    """docs/gpus.md with its table of base images brought up to date."""
    rows: dict[str, Callable[[BaseImage], str]] = {
        "base image": lambda it: f"`{it.name}`",
        "compute capability": lambda it: f"from {it.least[0]}.{it.least[1]}",
        "driver": lambda it: f"R{it.driver} or newer",
        "CUDA": lambda it: it.cuda,
        "Python": lambda it: it.python,
        "torch": lambda it: it.torch,
        "TransformerEngine": lambda it: it.transformer_engine or UNKNOWN,
        "NCCL": lambda it: it.nccl or UNKNOWN,
        "numpy": lambda it: it.numpy or UNKNOWN,
        "apex": lambda it: "yes" if it.apex else "no",
    }
    lines = [f"| {' | '.join(rows)} |", f"|{'---|' * len(rows)}"]
    lines += [f"| {' | '.join(cell(image) for cell in rows.values())} |" for image in BASE_IMAGES]
    return _replaced(page, BASES_BEGIN, "\n".join(lines), BASES_END)


def with_options(page: str) -> str:
    """docs/commands.md with the options and examples of every subcommand brought up to date."""
    return _replaced(page, OPTIONS_BEGIN, "\n".join(_commands(build_parser())), OPTIONS_END)


def with_config_keys(page: str) -> str:
    """docs/config-json.md with the keys of every family brought up to date."""
    lines = ["\n## All families\n", *_keys(keys.COMMON)]
    for family in FAMILIES:
        lines += [f"\n## {family.architecture}\n", *_keys(keys.own_keys(family))]
    lines.append("\n## rope_parameters and rope_scaling\n")
    base = keys.Honoured("rotary_base", keys.NUMBER, None)
    lines += _keys(keys.rotation_keys("", base))
    for kind, own in keys.ROPE_TYPES.items():
        lines += [f"\n### rope_type: {kind}\n", *_keys(own)] if own else []
    return _replaced(page, KEYS_BEGIN, "\n".join(lines), KEYS_END)


def _keys(known: Mapping[str, keys.Key]) -> Iterator[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for name, key in known.items():
        rows.setdefault((_effect(key), _without(key)), []).append(f"`{name}`")
    yield "| key | effect | without it |\n|---|---|---|"
    yield from (f"| {', '.join(names)} | {effect} | {without} |" for (effect, without), names in rows.items())


def _effect(key: keys.Key) -> str:
    if isinstance(key, keys.WithoutEffect):
        return f"none: {key.why}"
    if isinstance(key, keys.OfExperiment):
        return f"none on the logits; a run goes by `{key.field}`"
    if isinstance(key, keys.Honoured):
        if isinstance(key.kind, str):
            return f"`{key.field}`: a {key.kind}" + (", or null" if key.or_null else "")
        values = (f"`{json.dumps(theirs)}` is `{yaml.safe_dump(ours).split()[0]}`" for theirs, ours in key.kind.items())
        return f"`{key.field}`: {', '.join(values)}"
    choices = [f"`{json.dumps(it)}`" for it in key.values]
    if key.of_each:
        choices[0] = f"a list of only {choices[0]}"
    return f"**refused** unless {' or '.join(choices)}"


def _without(key: keys.Key) -> str:
    if isinstance(key, keys.Only):
        return "**refused**" if key.is_required else ""
    if not isinstance(key, keys.Honoured):
        return ""
    if key.default is keys.ABSENT:
        return "**refused**"
    return "by other keys" if key.default is None else f"`{json.dumps(key.default)}`"


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _commands(child)
    if parser.get_default("action") is None:
        return
    yield f"\n### {parser.prog}\n"
    yield from textwrap.wrap(" ".join((parser.description or "").split()), 100)
    yield "\n```sh"
    yield from (line.strip() for line in parser.format_help().partition("\nexamples:\n")[2].splitlines())
    yield "```\n\n| argument | meaning |\n|---|---|"
    for action in parser._actions:
        if action.dest != "help":
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            if action.choices is not None:
                value = f" {{{','.join(map(str, action.choices))}}}"
            names = ", ".join(f"`{option}{value}`" for option in action.option_strings) or f"`{value.strip()}`"
            text = (action.help or "").replace("|", "\\|").replace("<", "&lt;")
            yield f"| {names} | {text} |"


def _replaced(page: str, begin: str, text: str, end: str) -> str:
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


_PAGES: Mapping[str, Callable[[str], str]] = {
    "cluster": with_fields,
    "gpus": with_base_images,
    "commands": with_options,
    "config-json": with_config_keys,
}


def main() -> None:
    """Writes them all."""
    Path("configs/reference.yaml").write_text(experiment_reference())
    Path("configs/slurm/reference.yaml").write_text(slurm_reference())
    for name, brought in _PAGES.items():
        page = Path(f"docs/{name}.md")
        page.write_text(brought(page.read_text()))


if __name__ == "__main__":
    main()
