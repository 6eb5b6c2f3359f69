"""``tridock export`` and ``tridock generate``: use the weights of a run."""

import math
from pathlib import Path

from tridock.cli.options import Arguments, Commands, Parser, add_command, number
from tridock.errors import Problem, RequestError


def add(commands: Commands) -> None:
    run = "runs/demo-3d-20261122-110613-14b7"
    summary = "export a run's weights for Hugging Face's transformers"
    on_hosts = "--hosts hostfile demo-3d-20261122-110613-14b7"
    examples = (f"{run} -o exported", f"{on_hosts} -o exported --dtype bfloat16")
    parser = add_command(commands, "export", _export, summary, *examples)
    _add_weights(parser, "run folder (runs/<run-id>)")
    parser.add_argument("--format", choices=("hf",), default="hf", help="for Hugging Face's transformers (default: hf)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder to write")
    parser.add_argument("--iteration", type=int, metavar="N", help="checkpoint to export (default: the newest)")
    text = "data type of the weights (default: the checkpoint's)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    _add_tokenizer(parser)
    parser.add_quiet()

    examples = (f"{run} --prompt 'def '", f"{on_hosts} --prompt 'def '")
    parser = add_command(commands, "generate", _generate, "generate text from a run's weights", *examples)
    _add_weights(parser, "run folder (runs/<run-id>), transformers model folder")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    text = "file with a prompt in each line, after those of --prompt"
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help=text)
    text = "answer each prompt as a user's message, with the chat template of the tokenizer's folder"
    parser.add_flag("--chat", text)
    parser.add_argument("--iteration", type=int, metavar="N", help="checkpoint to read (default: the newest)")
    count = number(int, "at least 0", lambda it: it >= 0)
    text = "maximum number of tokens to generate (default: 50)"
    parser.add_argument("--max-new-tokens", type=count, metavar="N", help=text)
    text = "sampling temperature; 0 always takes the most likely token (default: the model's, else 1)"
    temperature = number(float, "at least 0", lambda it: 0 <= it < math.inf)
    parser.add_argument("--temperature", type=temperature, metavar="T", help=text)
    text = "sample from the K most likely tokens; 0 for all (default: the model's, else 0)"
    parser.add_argument("--top-k", type=count, metavar="K", help=text)
    text = "sample from the most likely tokens whose probabilities sum up to P (default: the model's, else 1)"
    probability = number(float, "greater than 0 and at most 1", lambda it: 0 < it <= 1)
    parser.add_argument("--top-p", type=probability, metavar="P", help=text)
    seed = number(int, "at least 0 and less than 2**63", lambda it: 0 <= it < 2**63)
    parser.add_argument("--seed", type=seed, metavar="N", help="random seed (default: 1234)")
    _add_tokenizer(parser)


def _add_weights(parser: Parser, text: str) -> None:
    text = f"{text}, or with a cluster a run id: its checkpoint is fetched into runs/"
    parser.add_argument("weights", type=Path, metavar="RUN", help=text)
    parser.add_cluster()


def _weights(arguments: Arguments, *, or_pretrained: bool = False) -> Path:
    """Returns the folder that is named, or that of a run of the cluster once the checkpoint is here.

    Sets the option ``--iteration`` to the checkpoint that was fetched.
    """
    from tridock.ops.runs.weights import check_run

    path: Path = arguments.weights
    if arguments.hosts is not None or not arguments.is_run_folder(str(path)):
        from tridock.ops.runs.cluster_runs import choose_run
        from tridock.ops.runs.fetch import fetch_checkpoint

        client = arguments.open_client()
        run = choose_run(client, path.name, active=False)
        path, arguments.iteration = fetch_checkpoint(client, run, Path("runs"), arguments.iteration)
    check_run(path, or_pretrained=or_pretrained)
    return path


def _add_tokenizer(parser: Parser) -> None:
    text = "tokenizer folder (default: that of train.load, or the one beside the data)"
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help=text)


def _export(arguments: Arguments) -> int:
    """Export the weights of a run, of any engine and layout, for Hugging Face's transformers: config.json,
    safetensors and the tokenizer's files. Of a run of a cluster, the newest whole checkpoint is fetched."""
    from tridock.ops.runs.weights import EXPORT, run_program

    weights = _weights(arguments)
    options = _options(arguments, "output", "iteration", "dtype", "tokenizer")
    return run_program(EXPORT, [str(weights), *options, *["--quiet"] * arguments.quiet])


def _generate(arguments: Arguments) -> int:
    """Continue prompts, or answer them as a chat, with the weights of a run or of a transformers model folder. The
    model's generation_config.json gives the tokens that end a text, and the defaults of sampling. Uses the GPU if there
    is one."""
    from tridock.ops.runs.weights import GENERATE, run_program

    file = arguments.prompt_file
    if file is None and not arguments.prompt:
        raise RequestError(Problem("--prompt", "is missing", "", "give a text to continue, or --prompt-file"))
    if file is not None and not file.exists():
        raise RequestError(Problem("--prompt-file", "does not exist", str(file), "give the path of a file of prompts"))
    weights = _weights(arguments, or_pretrained=True)
    prompts = [f"--prompt={prompt}" for prompt in arguments.prompt]
    names = ("prompt_file", "iteration", "tokenizer", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    options = [*_options(arguments, *names), *["--chat"] * arguments.chat]
    return run_program(GENERATE, [str(weights), *prompts, *options])


def _options(arguments: Arguments, *names: str) -> list[str]:
    """Returns the options that were given."""
    given = {name.replace("_", "-"): getattr(arguments, name) for name in names}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]
