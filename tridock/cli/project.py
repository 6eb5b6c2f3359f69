"""``tridock init`` and ``image``: what a new user runs first."""

import argparse
import shlex
from pathlib import Path

from tridock.cli.options import Commands, add_command
from tridock.errors import Problem, RequestError


def add(commands: Commands) -> None:
    summary = "copy configs, hostfiles and Compose files into a folder"
    parser = add_command(commands, "init", _init, summary, "", "mine")
    text = "folder to copy to (default: the current folder)"
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help=text)
    parser.add_argument("--force", action="store_true", help="replace files that exist and differ")

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


def _init(arguments: argparse.Namespace) -> int:
    """Copy configs, hostfiles and Compose files into a folder. Existing files are kept."""
    from tridock.ops.project import init

    folder = arguments.folder
    new = init(folder, force=arguments.force)
    print(f"files written to {folder.resolve()}: {len(new)}")
    if new:
        there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
        print(f"next: {there}cp hostfiles/example hostfile, and name your hosts in it")
    return 0


def _image(arguments: argparse.Namespace) -> int:
    """Build the node image, as make image does in a checkout. Needs Docker on this machine."""
    from tridock.ops.project import ImageOptions, build_image

    if arguments.wrap:
        return _wrap(arguments)
    options = ImageOptions(arguments.flavor, arguments.base_image, arguments.tag, arguments.ca, arguments.megatron)
    return build_image(options, Path())


def _wrap(arguments: argparse.Namespace) -> int:
    from tridock.ops.image.wrap import wrap

    action, *bases = arguments.wrap
    if action != "wrap" or len(bases) != 1:
        todo = "write tridock image wrap BASE --tag NAME, or tridock image alone"
        raise RequestError(Problem("tridock image", "builds an image, or wraps one", shlex.join(arguments.wrap), todo))
    if not arguments.tag:
        todo = "name the new image: --tag my-image:wrapped"
        raise RequestError(Problem("--tag", "is missing", "", todo))
    return wrap(bases[0], arguments.tag, arguments.ca)
