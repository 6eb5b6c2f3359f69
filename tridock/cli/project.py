"""``tridock init``, ``image`` and ``completion``: what a new user runs first."""

import argparse
import os
import shlex
from pathlib import Path

from tridock.cli.options import Arguments, Commands, add_command
from tridock.errors import Problem, RequestError
from tridock.project_files import recipes


def add(commands: Commands) -> None:
    add_command(commands, "recipes", _recipes, "list the recipes for fine-tuning and other programs", "")

    examples: tuple[str, ...] = ("", "mine", "--recipe sft")
    parser = add_command(commands, "init", _init, "copy configs, hostfiles and Compose files into a folder", *examples)
    text = "folder to copy to (default: the current folder, or one with the recipe's name)"
    parser.add_argument("folder", type=Path, nargs="?", default=None, metavar="FOLDER", help=text)
    text = "copy this recipe instead; tridock recipes lists them"
    parser.add_argument("--recipe", default="", metavar="NAME", help=text)
    parser.add_flag("--force", "replace files that exist and differ")

    examples = ("", "--flavor cpu", "wrap pytorch/pytorch:latest --tag mine:latest")
    parser = add_command(commands, "image", _image, "build the node image", *examples)
    text = "wrap BASE: add Tridock's layer to your own image, for tridock run; --tag names the result"
    parser.add_argument("wrap", nargs="*", metavar="wrap BASE", help=text)
    text = "gpu: on NVIDIA's PyTorch image; cpu: on Debian, for the twin (default: gpu)"
    parser.add_argument("--flavor", choices=("gpu", "cpu"), default="gpu", help=text)
    text = "base image (default: the one for this machine's GPUs; docs/gpus.md lists them)"
    parser.add_argument("--base-image", default="", metavar="IMAGE", help=text)
    text = "name of the new image (default: tridock:latest, or tridock:cpu)"
    parser.add_argument("-t", "--tag", default="", metavar="NAME", help=text)
    text = "PEM file with the CA certificates of your package proxy"
    parser.add_argument("--ca", default="", metavar="FILE", help=text)
    text = "source of Megatron-LM v1.1.5: a git repository, a folder, auto (upstream, if it answers), or none"
    parser.add_argument("--megatron", default="", metavar="WHERE", help=text)

    examples = (
        "bash >~/.local/share/bash-completion/completions/tridock",
        "fish >~/.config/fish/completions/tridock.fish",
    )
    parser = add_command(commands, "completion", _completion, "print a completion script for your shell", *examples)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")


def _recipes(_arguments: Arguments) -> int:
    """List the recipes: experiments with others' programs, with their data's shape and the memory to expect.
    tridock init --recipe NAME copies one."""
    found = recipes()
    for name, folder in found.items():
        title = (folder / "README.md").read_text().partition("\n")[0].removeprefix("# ")
        print(f"{name:{max(map(len, found))}}  {title}")
    return 0


def _init(arguments: Arguments) -> int:
    """Copy configs, hostfiles and Compose files into a folder, or a recipe. Existing files are kept."""
    from tridock.ops.project import init

    folder = arguments.folder or Path(arguments.recipe)
    new = init(folder, arguments.recipe, force=arguments.force)
    print(f"files written to {folder.resolve()}: {len(new)}")
    if arguments.recipe:
        print(f"next: read {shlex.quote(str(folder / 'README.md'))}")
    elif new:
        there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
        print(f"next: {there}cp hostfiles/example hostfile, and name your hosts in it")
    return 0


def _image(arguments: Arguments) -> int:
    """Build the node image, as make image does in a checkout. Needs Docker on this machine."""
    from tridock.ops.project import ImageOptions, build_image

    if arguments.wrap:
        return _wrap(arguments)
    options = ImageOptions(arguments.flavor, arguments.base_image, arguments.tag, arguments.ca, arguments.megatron)
    return build_image(options, Path())


def _wrap(arguments: Arguments) -> int:
    from tridock.ops.image.wrap import wrap

    action, *bases = arguments.wrap
    if action != "wrap" or len(bases) != 1:
        todo = "write tridock image wrap BASE --tag NAME, or tridock image alone"
        raise RequestError(Problem("tridock image", "builds an image, or wraps one", shlex.join(arguments.wrap), todo))
    if not arguments.tag:
        raise RequestError(Problem("--tag", "is missing", "", "name the new image: --tag my-image:wrapped"))
    return wrap(bases[0], arguments.tag, arguments.ca)


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and ends the process, if the shell asks for completions."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _completion(arguments: Arguments) -> int:
    """Print the script that makes your shell complete tridock's commands and options. For bash and zsh,
    eval "$(tridock completion bash)" in the shell's start-up file works too."""
    todo = "run it where tridock is installed for use at a terminal, not in a container of a run"
    with RequestError.in_place_of(ModuleNotFoundError, "completion", "needs the package argcomplete", todo):
        from argcomplete.shell_integration import shellcode
    print(shellcode(["tridock"], True, arguments.shell))
    return 0
