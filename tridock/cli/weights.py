"""``tridock export``: weights in other programs' formats."""

import argparse
from pathlib import Path

from tridock.cli.options import Commands, add_command, add_run_folder


def add(commands: Commands) -> None:
    run = "runs/demo-3d-20261122-110613-14b7"
    summary = "write a run's weights as a folder that transformers loads"
    parser = add_command(
        commands, "export", _export, summary, f"{run} -o exported", f"{run} -o exported --dtype bfloat16"
    )
    add_run_folder(parser)
    parser.add_argument("--format", choices=("hf",), default="hf", help="hf: Hugging Face's transformers (default: hf)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder to write")
    text = "checkpoint to export (default: the newest)"
    parser.add_argument("--iteration", type=int, metavar="N", help=text)
    text = "number format of the weights (default: the checkpoint's)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    _add_tokenizer(parser)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    text = "folder of the tokenizer (default: that of train.load, or the one beside the data)"
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)


def _export(arguments: argparse.Namespace) -> int:
    """Write a run's weights as a folder that transformers loads: config.json, safetensors, the tokenizer's files. Of
    engines torch and megatron-core, whatever their layout.
    """
    from tridock.ops.runs.weights import EXPORT, check_run, run_program

    check_run(arguments.run)
    given = {name: getattr(arguments, name) for name in ("output", "iteration", "dtype", "tokenizer")}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return run_program(EXPORT, [str(arguments.run), *options])
