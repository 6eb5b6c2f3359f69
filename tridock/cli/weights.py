"""``tridock export`` and ``tridock generate``: use the weights of a run."""

import argparse
from pathlib import Path

from tridock.cli.options import Commands, add_command, add_quiet, add_run_folder


def add(commands: Commands) -> None:
    run = "runs/demo-3d-20261122-110613-14b7"
    summary = "export a run's weights for Hugging Face's transformers"
    parser = add_command(
        commands, "export", _export, summary, f"{run} -o exported", f"{run} -o exported --dtype bfloat16"
    )
    add_run_folder(parser)
    parser.add_argument("--format", choices=("hf",), default="hf", help="for Hugging Face's transformers (default: hf)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder to write")
    text = "checkpoint to export (default: the newest)"
    parser.add_argument("--iteration", type=int, metavar="N", help=text)
    text = "data type of the weights (default: the checkpoint's)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    _add_tokenizer(parser)
    add_quiet(parser)

    parser = add_command(
        commands, "generate", _generate, "generate text from a run's weights", f"{run} --prompt 'def '"
    )
    text = "run folder (runs/<run-id>), or a transformers model folder"
    parser.add_argument("weights", type=Path, metavar="RUN", help=text)
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="text to continue; repeatable")
    parser.add_argument("--iteration", type=int, metavar="N", help="checkpoint to read (default: the newest)")
    text = "maximum number of tokens to generate (default: 50)"
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=text)
    text = "sampling temperature; 0 always takes the most likely token (default: 1)"
    parser.add_argument("--temperature", type=float, metavar="T", help=text)
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="random seed (default: 1234)")
    _add_tokenizer(parser)


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    text = "tokenizer folder (default: that of train.load, or the one beside the data)"
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)


def _export(arguments: argparse.Namespace) -> int:
    """Export the weights of a run, of any engine and layout, for Hugging Face's transformers: config.json,
    safetensors and the tokenizer's files.
    """
    from tridock.ops.runs.weights import EXPORT, check_run, run_program

    check_run(arguments.run)
    options = _options(arguments, "output", "iteration", "dtype", "tokenizer")
    return run_program(EXPORT, [str(arguments.run), *options, *["--quiet"] * arguments.quiet])


def _generate(arguments: argparse.Namespace) -> int:
    """Continue a prompt with the weights of a run or of a transformers model folder. Uses the GPU if there is
    one.
    """
    from tridock.ops.runs.weights import GENERATE, check_run, run_program

    check_run(arguments.weights, or_pretrained=True)
    prompts = [f"--prompt={prompt}" for prompt in arguments.prompt]
    names = ("iteration", "tokenizer", "max_new_tokens", "temperature", "top_k", "seed")
    return run_program(GENERATE, [str(arguments.weights), *prompts, *_options(arguments, *names)])


def _options(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Returns the options that were given."""
    given = {name.replace("_", "-"): getattr(arguments, name) for name in names}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]
